"""Models that `kvpilot plan` knows by name.

models.yaml has well-known models with their exact number of parameters. published.json has the config.json of the
models of docs/models.md, from which `facts_config` computes the facts.
"""

import difflib
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from typing import Any

import yaml

from kvpilot_cli.plan.facts import Model, PlanError
from kvpilot_cli.plan.facts_config import from_config


@functools.cache
def table() -> tuple[Model, ...]:
    """Return the models of models.yaml, in the order of the file."""
    return tuple(
        Model(**{**entry, "also": tuple(entry.get("also", ()))}) for entry in yaml.safe_load(_read("models.yaml"))
    )


@functools.cache
def published() -> dict[str, dict[str, Any]]:
    """Return the entries of published.json by model name, in the order of the file."""
    return {entry["model"]: entry for entry in json.loads(_read("published.json"))["models"]}


def find(name: str) -> Model:
    """Find a model by its full name, or by the part after the slash, in upper or lower case.

    The returned model has the proper spelling of its name.

    Raises:
        PlanError: the name is unknown; the message suggests similar ones.
    """
    known = _known()
    if (hit := known.get(_key(name))) is not None:
        called, facts = hit
        return replace(facts(), name=called)
    close = difflib.get_close_matches(_key(name).rpartition("/")[2], known, n=4, cutoff=0.5)
    shown = list(dict.fromkeys(known[key][0] for key in close))
    hint = f"did you mean {', '.join(shown)}?" if shown else "`kvpilot plan --list` shows them all"
    raise PlanError(f"MODEL {name!r} is neither a folder nor in the table; {hint}")


def names() -> list[str]:
    """Return the proper names of all models in order."""
    return sorted({called for called, _ in _known().values()})


@functools.cache
def _known() -> dict[str, tuple[str, Callable[[], Model]]]:
    """Return each model's proper name and facts, by full and by short name. models.yaml takes precedence."""
    named: list[tuple[str, Callable[[], Model]]] = [
        *((name, functools.partial(_of_config, name)) for name in published()),
        *((name, functools.partial(replace, model)) for model in table() for name in (*model.also, model.name)),
    ]
    # A name without a publisher is a short name, so take the full name from its facts.
    full = {_key(name): (name if "/" in name else facts().name, facts) for name, facts in named}
    return {key.rpartition("/")[2]: value for key, value in full.items()} | full


def _of_config(name: str) -> Model:
    entry = published()[name]
    return replace(from_config(entry["config"], name), source=entry["source"])


def _read(file: str) -> str:
    return (resources.files("kvpilot_cli.plan") / file).read_text(encoding="utf-8")


def _key(name: str) -> str:
    return name.lower().strip("/")
