"""Describe to users how the spec differs from the serving revision, apart from the KV-cache dtype."""

import re
from collections.abc import Sequence

from kvpilot_formats.arguments import read
from kvpilot_operator.api.names import ENGINE_CONTAINER
from kvpilot_operator.decide.context import Context
from kvpilot_operator.render.engine import model_location
from kvpilot_operator.state.status import Canary, Stable

_LONGEST = 80
_MOST = 4
# Names of options with secret values, such as vLLM's `--api-key` and `--hf-token`. Options that count tokens, like
# `--recent-tokens`, and those of the tokenizer are no secret.
_SECRET = re.compile("key|token(?!s|iz|-ids|-threshold)|secret|password|credential", re.IGNORECASE)


def spec_changes(c: Context, stable: Stable) -> str:
    """Describe changes of image, model and arguments. Return "" if the spec renders the serving revision."""
    asked, there = c.render(stable.dtype), c.snapshot.deployments.get(stable.revision)
    if asked.name == stable.revision:
        return ""
    found = []
    if there is not None:
        engine = next(one for one in asked.template["spec"]["containers"] if one["name"] == ENGINE_CONTAINER)
        if there.image is not None and there.image != engine.get("image"):
            found.append(f"image {there.image} -> {engine.get('image')}")
        if there.model is not None and there.model != model_location(c.spec):
            found.append(f"model {there.model} -> {model_location(c.spec)}")
        found += _arguments(there.arguments, engine.get("args") or ()) if there.arguments else []
    return "; ".join(found[:_MOST]) or "the pods' template (such as resources, variables, volumes, scheduling)"


def move(canary: Canary) -> str:
    """Return the old and the new dtype of a trial as text, or one dtype if the trial does not change it."""
    return canary.dtype if canary.dtype == canary.from_dtype else f"{canary.from_dtype} -> {canary.dtype}"


def _arguments(before: Sequence[object], after: Sequence[object]) -> list[str]:
    old, new = _options(before), _options(after)
    changed = (name for name in {**old, **new} if old.get(name) != new.get(name) and name != "--model")
    return [f"argument {name}{_change(name, old.get(name), new.get(name))}" for name in changed]


def _change(name: str, old: str | None, new: str | None) -> str:
    if _SECRET.search(name):
        return " changed"
    was, now = (text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..." for text in (old or "", new or ""))
    if old is None:
        return f" added{f' ({now})' if now else ''}"
    return " removed" if new is None else f" {was or 'unset'} -> {now or 'unset'}"


def _options(arguments: Sequence[object]) -> dict[str, str]:
    """Return each option's values, joined by spaces. An option that is repeated has the values of all its uses."""
    found: dict[str, str] = {}
    for one in read(map(str, arguments)).given:
        values = ("off",) if one.off else one.values
        found[one.name] = " ".join((*filter(None, (found.get(one.name),)), *values))
    return found
