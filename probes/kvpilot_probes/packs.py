"""Probe packs: the prompts that accuracy is measured on, built in or from a user's ConfigMap.

A pack is YAML (example: docs/accuracy-packs.md). Tags are refused because they could run code, and aliases because they
could expand to any size.
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from kvpilot_formats.untrusted import lines
from kvpilot_probes import schemas
from kvpilot_probes.errors import PackError, PackTooLarge

_WRITTEN = ("general", "multi-turn", "structured")
# Packs whose prompts depend on the engine's context and tokenizer: `generated.py` makes them.
GENERATED = ("long-context", "paths", "agent", "reasoning", "images")
BUILTIN = (*_WRITTEN, *GENERATED)
CONFIG_MAP_KEY = "prompts.yaml"
MAX_PROMPTS = 64
MAX_PACK_BYTES = 32 * 1024
MAX_LEVELS = 24
MAX_MESSAGES = 16
# Largest number of characters of all texts together, without filler.
MAX_CHARACTERS = 512 * 1024
MAX_TOOLS = 16
MAX_NAME = 40
FILLER = "{{filler}}"
# Edition of the generated packs, a part of a baseline's identity. Change it if the prompts of these packs change.
EDITION = "4"
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxstring, _SHORT.maxother = 2, 4, 60, 60

_Text = Annotated[str, Meta(pattern=r"\S")]
_Percent = Annotated[int, Meta(ge=0, le=90)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: _Text


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    name: _Text
    description: _Text
    parameters: dict[str, Any]


class _Entry(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[_Tool], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None
    fact: _Text | None = None
    fill_percent: _Percent | None = None
    depth_percent: _Percent | None = None


class _Pack(msgspec.Struct, forbid_unknown_fields=True):
    prompts: list[_Entry] | None


@dataclass(frozen=True, slots=True)
class Fill:
    """Filler text that replaces `{{filler}}`.

    - `percent`: length of the whole prompt, in percent of the context.
    - `depth`: position of the fact, in percent of that length.
    - `fact`: sentence that the prompt asks for.
    """

    percent: int
    depth: int
    fact: str


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    """Prompt: a chat that ends with a user's turn, or a whole generated pack, which has no messages.

    - `tools`: JSON list of the functions that the model may call.
    - `bucket`: the case that the prompt tests. Damage is judged in each bucket.
    - `fill`: filler in the messages, or None.
    - `context`: largest number of tokens of the engine's context to use, or 0 for all.
    """

    pack: str
    name: str
    messages: tuple[Message, ...]
    tools: str = ""
    bucket: str = "general"
    fill: Fill | None = None
    context: int = 0


def load(
    probe_sets: Sequence[str],
    config_maps: Mapping[str, Mapping[str, str]] | None = None,
    context_tokens: int = 0,
) -> tuple[ProbePrompt, ...]:
    """Return the prompts of the packs in `probe_sets`, in order.

    A generated pack is returned as one prompt without messages, because its prompts depend on the engine.

    - `probe_sets`: names, `builtin/NAME` or `configmap/NAME`.
    - `config_maps`: data of each ConfigMap, by its name.
    - `context_tokens`: most tokens of the engine's context that long prompts use; 0 means all.

    Raises:
        PackError: a pack is missing, invalid or too large.
    """
    prompts: list[ProbePrompt] = []
    for probe_set in dict.fromkeys(probe_sets):
        kind, _, name = probe_set.partition("/")
        if kind == "builtin" and name in GENERATED:
            prompts.append(ProbePrompt(probe_set, EDITION, (), bucket=name, context=context_tokens))
            continue
        entries = _entries(probe_set, config_maps or {})
        if len(prompts) + len(entries) > MAX_PROMPTS:
            raise PackTooLarge(
                f"spec.accuracy.probeSets: the sets up to {probe_set} have {len(prompts) + len(entries)} prompts, but "
                f"a probe may have {MAX_PROMPTS}: name fewer sets or shorten your own"
            )
        prompts.extend(_prompts(probe_set, entries, context_tokens))
        size = sum(len(message.content) for prompt in prompts for message in prompt.messages)
        if size > MAX_CHARACTERS:
            raise PackTooLarge(
                f"spec.accuracy.probeSets: the prompts up to {probe_set} have {size} characters, but a probe may have "
                f"{MAX_CHARACTERS}: name fewer sets, or shorten your texts"
            )
    if not prompts:
        raise PackError("spec.accuracy.probeSets: no probe set named; name at least one, such as builtin/general")
    return tuple(prompts)


def _entries(probe_set: str, config_maps: Mapping[str, Mapping[str, str]]) -> Sequence[_Entry]:
    kind, _, name = probe_set.partition("/")
    if kind == "builtin" and name in _WRITTEN:
        return _builtin(name)
    return _parse(probe_set, _text(probe_set, config_maps))


@cache
def _builtin(name: str) -> Sequence[_Entry]:
    return _parse(f"builtin/{name}", (files(__package__) / "data" / f"{name}.yaml").read_text(encoding="utf-8"))


def _text(probe_set: str, config_maps: Mapping[str, Mapping[str, str]]) -> str:
    kind, _, name = probe_set.partition("/")
    if kind == "configmap" and name:
        data = config_maps.get(name)
        if data is None:
            raise PackError(
                f"spec.accuracy.probeSets: {probe_set!r}: no ConfigMap {name!r} in the service's namespace; create it "
                f"with a key {CONFIG_MAP_KEY}"
            )
        if CONFIG_MAP_KEY not in data:
            raise PackError(
                f"spec.accuracy.probeSets: {probe_set!r}: ConfigMap {name!r} has no key {CONFIG_MAP_KEY}, only "
                f"{sorted(data)[:8]}; put the prompts there"
            )
        return data[CONFIG_MAP_KEY]
    known = ", ".join(f"builtin/{b}" for b in BUILTIN)
    raise PackError(f"spec.accuracy.probeSets: {probe_set[:80]!r} is unknown; use {known} or configmap/NAME")


def _parse(source: str, text: str) -> Sequence[_Entry]:
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_PACK_BYTES:
        raise PackTooLarge(f"{source}: {size} bytes of YAML; a pack holds at most {MAX_PACK_BYTES}: shorten its texts")
    try:
        loaded = _plain(text)
    except (yaml.YAMLError, TypeError, ValueError, OverflowError) as error:
        why = lines(str(error))[:300]
        raise PackError(f"{source}: not plain YAML: {why}; see docs/accuracy-packs.md for the form") from error
    if loaded is None:
        raise PackError(f"{source}: the pack is empty; add at least one entry under prompts")
    try:
        entries = msgspec.convert(loaded, _Pack).prompts
    except msgspec.ValidationError as error:
        why, _, path = str(error).partition(" - at `$")
        where = path.rstrip("`").removeprefix(".") or "the pack"
        words = f"{source}: {where}: {_show(_value_at(loaded, path))}: {why[:160]}"
        raise PackError(f"{words}; put texts in quotes, and see docs/accuracy-packs.md for the form") from None
    if not entries:
        raise PackError(f"{source}: prompts is empty; add at least one entry")
    return entries


def _value_at(value: Any, path: str) -> object:
    """Return the value at a path as msgspec writes it, such as `.prompts[0].name`."""
    for field, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        value = value[field] if field else value[int(index)]
    return value


class _Loader(yaml.CSafeLoader):
    """Safe YAML loader that also refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        """Return the mapping of a node. Raise ValueError for a duplicate key."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"line {node.start_mark.line + 1}: the key {twice[:80]!r} is given twice: keep one")
        mapping: dict[object, object] = super().construct_mapping(node, deep=deep)
        return mapping


def _plain(text: str) -> object:
    """Return the value of a YAML document. Raise ValueError for features that JSON lacks."""
    depth = 0
    # Check the parser's events before any value is built, so that the cost is proportional to the text's length.
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_LEVELS:
            raise _refused(event, f"more than {MAX_LEVELS} levels: nest less")
        if isinstance(event, yaml.NodeEvent) and (event.anchor, getattr(event, "tag", None)) != (None, None):
            raise _refused(event, "an anchor, alias or tag: write the value out, and put texts in quotes")
    value: object = yaml.load(text, Loader=_Loader)  # noqa: S506 - it is a safe loader
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a value is not one of JSON: {error}: put it in quotes if it is a text") from error
    return value


def _refused(event: yaml.Event, why: str) -> ValueError:
    at = f"line {event.start_mark.line + 1}: " if event.start_mark is not None else ""
    return ValueError(f"{at}{why}")


def _prompts(source: str, entries: Sequence[_Entry], context_tokens: int) -> list[ProbePrompt]:
    names = [entry.name for entry in entries]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise PackError(f"{source}: the name {twice!r} is used twice; give every prompt its own")
    return [_prompt(source, i, entry, context_tokens) for i, entry in enumerate(entries)]


def _prompt(source: str, index: int, entry: _Entry, context_tokens: int) -> ProbePrompt:
    where, messages = f"{source}: prompts[{index}]", entry.messages
    if messages[-1].role != "user":
        raise PackError(f"{where}.messages: the last role is {messages[-1].role!r}; end with a user's turn")
    for number, tool in enumerate(entry.tools or ()):
        if (wrong := schemas.fault(tool.parameters)) is not None:
            raise PackError(f"{where}.tools[{number}].{wrong}")
    fill = None
    if sum(m.content.count(FILLER) for m in messages) == 1:
        if entry.fact is None or entry.fill_percent is None or entry.depth_percent is None:
            raise PackError(f"{where}: a prompt with {FILLER} needs fact, fillPercent and depthPercent")
        fill = Fill(entry.fill_percent, entry.depth_percent, entry.fact.strip())
    chat = tuple(Message(m.role, m.content.strip()) for m in messages)
    tools = json.dumps(msgspec.to_builtins(entry.tools), ensure_ascii=False, separators=(",", ":"))
    bucket = source.partition("/")[2]
    context = context_tokens if fill is not None else 0
    return ProbePrompt(source, entry.name, chat, tools if entry.tools is not None else "", bucket, fill, context)


def _show(value: object) -> str:
    # A value may have 32 KiB and a message shows only its start, so use a shortened repr.
    return _SHORT.repr(value)[:120]
