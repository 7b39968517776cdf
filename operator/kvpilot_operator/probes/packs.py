"""Probe packs: the prompts that accuracy is measured on, built in or from a user's ConfigMap.

A pack is YAML (a ConfigMap keeps it under the key `prompts.yaml`):

    prompts:
    - name: capital                 # unique in the pack
      messages:                     # ends with a user's turn
      - {role: user, content: What is the capital of France?}
      tools:                        # optional: functions that the model may call
      - name: get_area
        description: The area of a country.
        parameters: {type: object, properties: {country: {type: string}}}   # a JSON schema

A prompt may hold the word `{{filler}}` once in one of its messages: a generated text then replaces it.
It has `fillPercent` of the room that the model's context leaves, with the prompt's `fact` `depthPercent` into it.
That is how `builtin/long-context` follows a model's context without storing long texts.

The YAML has no tags, anchors or aliases: they could make a small text large or run a constructor. Bounds keep a probe
cheap wherever it runs: at most 64 prompts over all packs, 32 KiB of YAML text a pack and 16 messages a prompt. On two
CPU cores a small model decodes 10 to 25 tokens a second, so 8 prompts of 32 tokens take 10 to 25 s.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

from kvpilot_formats.untrusted import lines
from kvpilot_operator.probes.errors import EmptyPack, MalformedPack, PackTooLarge, UnknownPack

BUILTIN = ("general", "multi-turn", "long-context", "structured")
CONFIG_MAP_KEY = "prompts.yaml"
MAX_PROMPTS = 64
MAX_PACK_BYTES = 32 * 1024
MAX_LEVELS = 24
MAX_MESSAGES = 16
# Limit for all filled prompts together. It leaves room for the 65,536 tokens that a baseline can hold.
MAX_CHARACTERS = 512 * 1024
MAX_TOOLS = 16
MAX_NAME = 40
# Fill at most this many tokens, even in longer contexts: a probe must not occupy the engine with prefills.
MAX_FILL_TOKENS = 8192
DEFAULT_CONTEXT_TOKENS = 4096
_ROLES = ("system", "user", "assistant")
_FILLER = "{{filler}}"
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxstring, _SHORT.maxother = 2, 4, 60, 60
_PROMPT_KEYS = {"name", "messages", "tools", "fact", "fillPercent", "depthPercent"}
_TOOL_KEYS = {"name", "description", "parameters"}
# English prose is about 1.3 tokens a word; 1.6 leaves room for tokenizers with small vocabularies.
_TOKENS_PER_WORD = 1.6


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    """One question: a chat that ends with a user's turn; `pack` and `name` identify its source.

    `tools` are the functions that the model may call, a JSON list of objects with name, description and parameters.
    """

    pack: str
    name: str
    messages: tuple[Message, ...]
    tools: str = ""


def load(
    probe_sets: Sequence[str],
    config_maps: Mapping[str, Mapping[str, str]] | None = None,
    context_tokens: int = DEFAULT_CONTEXT_TOKENS,
) -> tuple[ProbePrompt, ...]:
    """Return the prompts of `probe_sets` in order.

    `builtin/NAME` is a pack of this module, `configmap/NAME` one of `config_maps` (a ConfigMap's name to its data).
    `context_tokens` is the model's context: filled prompts stay inside it. Raises `UnknownPack`, `EmptyPack`,
    `MalformedPack` or `PackTooLarge`.
    """
    prompts: list[ProbePrompt] = []
    for probe_set in dict.fromkeys(probe_sets):
        entries = _entries(probe_set, config_maps or {})
        if len(prompts) + len(entries) > MAX_PROMPTS:
            raise PackTooLarge(
                f"spec.accuracy.probeSets: {len(prompts) + len(entries)} prompts up to {probe_set}; at most "
                f"{MAX_PROMPTS} in all keep a probe cheap: name fewer sets or shorten your own"
            )
        prompts.extend(_prompts(probe_set, entries, context_tokens))
        size = sum(len(message.content) for prompt in prompts for message in prompt.messages)
        if size > MAX_CHARACTERS:
            raise PackTooLarge(
                f"spec.accuracy.probeSets: {size} characters in the prompts up to {probe_set}; at most "
                f"{MAX_CHARACTERS} in all keep a probe cheap: name fewer sets, or fill fewer prompts with less"
            )
    if not prompts:
        raise EmptyPack("spec.accuracy.probeSets: no probe set named; name at least one, such as builtin/general")
    return tuple(prompts)


def _entries(probe_set: str, config_maps: Mapping[str, Mapping[str, str]]) -> Sequence[object]:
    kind, _, name = probe_set.partition("/")
    if kind == "builtin" and name in BUILTIN:
        return _builtin(name)
    return _parse(probe_set, _text(probe_set, config_maps))


@cache
def _builtin(name: str) -> Sequence[object]:
    return _parse(f"builtin/{name}", (files(__package__) / "data" / f"{name}.yaml").read_text(encoding="utf-8"))


def _text(probe_set: str, config_maps: Mapping[str, Mapping[str, str]]) -> str:
    kind, _, name = probe_set.partition("/")
    if kind == "configmap" and name:
        data = config_maps.get(name)
        if data is None:
            raise UnknownPack(
                f"spec.accuracy.probeSets: {probe_set!r}: no ConfigMap {name!r} in the service's namespace; create it "
                f"with a key {CONFIG_MAP_KEY}"
            )
        if CONFIG_MAP_KEY not in data:
            raise MalformedPack(
                f"spec.accuracy.probeSets: {probe_set!r}: ConfigMap {name!r} has no key {CONFIG_MAP_KEY}, only "
                f"{sorted(data)[:8]}; put the prompts there"
            )
        return data[CONFIG_MAP_KEY]
    known = ", ".join(f"builtin/{b}" for b in BUILTIN)
    raise UnknownPack(f"spec.accuracy.probeSets: {probe_set[:80]!r} is unknown; use {known} or configmap/NAME")


def _parse(source: str, text: str) -> Sequence[object]:
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_PACK_BYTES:
        raise PackTooLarge(f"{source}: {size} bytes of YAML; a pack holds at most {MAX_PACK_BYTES}: shorten its texts")
    try:
        loaded = _plain(text)
    except (yaml.YAMLError, TypeError, ValueError, OverflowError) as error:
        why = lines(str(error))[:300]
        raise MalformedPack(f"{source}: not plain YAML: {why}; see docs/accuracy.md for the form") from error
    if loaded is None:
        raise EmptyPack(f"{source}: the pack is empty; add at least one entry under prompts")
    if not isinstance(loaded, dict) or set(loaded) != {"prompts"} or not isinstance(loaded["prompts"], list | None):
        raise MalformedPack(f"{source}: found {_show(loaded)}; a pack is one mapping with the key prompts, a list")
    entries: Sequence[object] = loaded["prompts"] or ()
    if not entries:
        raise EmptyPack(f"{source}: prompts is empty; add at least one entry")
    return entries


class _Loader(yaml.CSafeLoader):
    """The safe loader, which refuses a mapping with a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        """Return the mapping of a node."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"line {node.start_mark.line + 1}: the key {twice[:80]!r} is given twice: keep one")
        mapping: dict[object, object] = super().construct_mapping(node, deep=deep)
        return mapping


def _plain(text: str) -> object:
    """Return the value of a YAML document that uses no more of YAML than JSON has.

    Raises yaml.YAMLError, TypeError, ValueError or OverflowError for any other text.
    """
    depth = 0
    # The parser's events come before any value is made, so the cost of a text is proportional to its length.
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


def _prompts(source: str, entries: Sequence[object], context_tokens: int) -> list[ProbePrompt]:
    prompts = [_prompt(source, i, entry, context_tokens) for i, entry in enumerate(entries)]
    names = [p.name for p in prompts]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise MalformedPack(f"{source}: the name {twice!r} is used twice; give every prompt its own")
    return prompts


def _prompt(source: str, index: int, entry: object, context_tokens: int) -> ProbePrompt:
    where = f"{source}: prompts[{index}]"
    if not isinstance(entry, dict) or not {"name", "messages"} <= set(entry) or not set(entry) <= _PROMPT_KEYS:
        raise MalformedPack(f"{where}: found {_show(entry)}; a prompt has name, messages and nothing unknown")
    name, turns = entry["name"], entry["messages"]
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise MalformedPack(f"{where}.name: {_show(name)}; give a text of 1 to {MAX_NAME} characters")
    if not isinstance(turns, list) or not 0 < len(turns) <= MAX_MESSAGES:
        raise MalformedPack(f"{where}.messages: found {_show(turns)}; give a list of 1 to {MAX_MESSAGES} messages")
    messages = tuple(_message(f"{where}.messages[{i}]", turn) for i, turn in enumerate(turns))
    if messages[-1].role != "user":
        raise MalformedPack(f"{where}.messages: the last role is {messages[-1].role!r}; end with a user's turn")
    if sum(m.content.count(_FILLER) for m in messages) == 1:
        messages = _filled(where, entry, messages, context_tokens)
    return ProbePrompt(source, name, messages, _tools(where, entry["tools"]) if "tools" in entry else "")


def _message(where: str, turn: object) -> Message:
    if not isinstance(turn, dict) or set(turn) != {"role", "content"}:
        raise MalformedPack(f"{where}: found {_show(turn)}; a message has role and content")
    role, content = turn["role"], turn["content"]
    if role not in _ROLES:
        raise MalformedPack(f"{where}.role: {_show(role)}; use one of {', '.join(_ROLES)}")
    if not isinstance(content, str) or not content.strip():
        raise MalformedPack(f"{where}.content: {_show(content)}; give a text (quote numbers)")
    return Message(role, content.strip())


def _tools(where: str, given: object) -> str:
    if not isinstance(given, list) or not 0 < len(given) <= MAX_TOOLS:
        raise MalformedPack(
            f"{where}.tools: found {_show(given)}; give a list of 1 to {MAX_TOOLS} tools, or no such key"
        )
    for i, tool in enumerate(given):
        if not isinstance(tool, dict) or set(tool) != _TOOL_KEYS:
            raise MalformedPack(f"{where}.tools[{i}]: found {_show(tool)}; a tool has {', '.join(sorted(_TOOL_KEYS))}")
        for key in ("name", "description"):
            if not isinstance(tool[key], str) or not tool[key].strip():
                raise MalformedPack(f"{where}.tools[{i}].{key}: {_show(tool[key])}; give a text")
        if not isinstance(tool["parameters"], dict):
            raise MalformedPack(f"{where}.tools[{i}].parameters: {_show(tool['parameters'])}; give a JSON schema")
    return json.dumps(given, ensure_ascii=False, separators=(",", ":"))


def _filled(where: str, entry: dict[str, object], messages: tuple[Message, ...], context: int) -> tuple[Message, ...]:
    fact, fill, depth = entry.get("fact"), entry.get("fillPercent"), entry.get("depthPercent")
    if not isinstance(fact, str) or not fact.strip():
        raise MalformedPack(f"{where}.fact: {_show(fact)}; a prompt with {_FILLER} gives the fact to hide in it")
    for key, value in (("fillPercent", fill), ("depthPercent", depth)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 90:
            raise MalformedPack(f"{where}.{key}: {_show(value)}; give a whole number from 0 to 90")
    assert isinstance(fill, int) and isinstance(depth, int)  # noqa: S101 - the loop above has checked them
    words = int(min(context, MAX_FILL_TOKENS) * fill / 100 / _TOKENS_PER_WORD)
    text = _filler(words, fact.strip(), depth)
    return tuple(Message(m.role, m.content.replace(_FILLER, text)) for m in messages)


_PLACES = ("harbour", "orchard", "station", "library", "mill", "observatory", "quarry", "market", "bridge", "school")
_PEOPLE = ("the keeper", "a young surveyor", "the baker", "two porters", "the clerk", "an old gardener", "the captain")
_DEEDS = (
    "counted the crates that had come in overnight",
    "wrote the height of the water into the ledger",
    "repaired the latch on the eastern door",
    "waited for the post and spoke about the weather",
    "marked the boundary stones with white paint",
    "lent a ladder to the neighbours",
    "sorted the letters by street and then by number",
    "tested the lamp twice before the fog came",
    "carried four sacks of flour up the stairs",
)
_WHEN = ("In the morning", "Before noon", "At the end of the day", "On the following day", "After the rain")


def _filler(words: int, fact: str, depth_percent: int) -> str:
    """Return about `words` words of plain prose with `fact` at `depth_percent` of it; the same for the same arguments.

    The lists (5, 10, 7 and 9 entries) make 3,150 different sentences. The stride is coprime to that number, so no
    sentence repeats before all were used. MAX_FILL_TOKENS hold fewer sentences than that.
    """
    sentences: list[str] = []
    count = 0
    while count < words:
        rest, deed = divmod(len(sentences) * 1013 % 3150, len(_DEEDS))
        rest, person = divmod(rest, len(_PEOPLE))
        when, place = divmod(rest, len(_PLACES))
        sentence = f"{_WHEN[when]}, at the {_PLACES[place]}, {_PEOPLE[person]} {_DEEDS[deed]}."
        sentences.append(sentence)
        count += len(sentence.split())
    sentences.insert(len(sentences) * depth_percent // 100, fact)
    return " ".join(sentences)


def _show(value: object) -> str:
    # Use a shortened repr: a value may have 32 KiB, and a message only shows its start.
    return _SHORT.repr(value)[:120]
