"""The built-in table of well-known models."""

from __future__ import annotations

import difflib
import functools
from importlib import resources

import yaml

from kvpilot_cli.plan.facts import Model, PlanError


@functools.cache
def table() -> tuple[Model, ...]:
    """Return every model of models.yaml, in its order."""
    text = (resources.files("kvpilot_cli.plan") / "models.yaml").read_text()
    return tuple(Model(**{**entry, "also": tuple(entry.get("also", ()))}) for entry in yaml.safe_load(text))


def find(name: str) -> Model:
    """Return the model called `name`: its full name or the part after the slash, in any case."""
    known = {_key(alias): (alias, model) for model in table() for alias in (*model.also, model.name)}
    known |= {key.rpartition("/")[2]: value for key, value in known.items()}
    if (hit := known.get(_key(name))) is not None:
        return hit[1]
    close = difflib.get_close_matches(_key(name).rpartition("/")[2], known, n=4, cutoff=0.5)
    shown = list(dict.fromkeys(known[key][0] for key in close))
    hint = f"did you mean {', '.join(shown)}?" if shown else "`kvpilot plan --list` shows them all"
    raise PlanError(f"MODEL {name!r} is neither a folder nor in the table; {hint}")


def _key(name: str) -> str:
    return name.lower().strip("/")
