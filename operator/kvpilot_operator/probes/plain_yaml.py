"""YAML that says no more than JSON does: no tags, anchors, aliases or merge keys, one document, within bounds. Pure.

The text is a tenant's. Each event is judged before a value is made of it, so the cost of a text is proportional to its
length. Whatever makes a small text large (an alias, a merge key) or runs a constructor (a tag) is refused on the spot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from kvpilot_formats.untrusted import lines

Json = Any
"""A value as a JSON decoder returns it."""

MAX_NODES = 8192
MAX_DEPTH = 24
_TAG = "tag:yaml.org,2002:"
_PLAIN = Resolver()
_MAKE = SafeConstructor()
# Digits of a number that a JSON reader keeps exactly; longer ones are texts that want quotes.
_MAX_NUMBER = 32


class NotPlainYaml(ValueError):
    """Not YAML, or YAML with more in it than is read here; the message names the line and the remedy."""


def read(text: str) -> Json:
    """Return the value of the one document: None, bool, int (64 bits), float (finite), str, list or dict of str.

    Plain scalars mean what they mean in YAML 1.1, as in Kubernetes' manifests. Raises `NotPlainYaml`, and nothing else,
    for any other text, for more than `MAX_NODES` values or keys, and for more than `MAX_DEPTH` levels.
    """
    try:
        return _Reader(yaml.parse(text, Loader=yaml.CSafeLoader)).document()
    except yaml.YAMLError as error:
        raise NotPlainYaml(f"not YAML: {lines(str(error))[:300]}") from error
    except UnicodeEncodeError as error:
        raise NotPlainYaml(f"not YAML: half a surrogate pair at character {error.start}") from error


class _Reader:
    def __init__(self, events: Iterator[yaml.Event]) -> None:
        self._events = events
        self._left = MAX_NODES

    def document(self) -> Json:
        value: Json = None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _refused(event, "a second document begins: keep one")
            elif isinstance(event, yaml.NodeEvent):
                value = self._value(event, 1)
        return value

    def _value(self, event: yaml.Event, depth: int) -> Json:
        self._left -= 1
        if self._left < 0:
            raise _refused(event, f"more than {MAX_NODES} values and keys: write fewer")
        if depth > MAX_DEPTH:
            raise _refused(event, f"more than {MAX_DEPTH} levels: nest less")
        if isinstance(event, yaml.AliasEvent):
            raise _refused(event, "an alias: write the value out")
        if getattr(event, "anchor", None) is not None:
            raise _refused(event, "an anchor: there are no aliases here, remove it")
        if getattr(event, "tag", None) is not None:
            raise _refused(event, "a tag: remove it, and put texts in quotes")
        if isinstance(event, yaml.SequenceStartEvent):
            return [self._value(item, depth + 1) for item in self._until(yaml.SequenceEndEvent)]
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(depth)
        return _scalar(event)

    def _mapping(self, depth: int) -> dict[str, Json]:
        found: dict[str, Json] = {}
        for event in self._until(yaml.MappingEndEvent):
            key = self._value(event, depth + 1)
            if not isinstance(key, str):
                raise _refused(event, f"the key {_excerpt(event)} is not a text: put it in quotes")
            if key in found:
                raise _refused(event, f"the key {_excerpt(event)} a second time: remove one")
            found[key] = self._value(next(self._events), depth + 1)
        return found

    def _until(self, end: type[yaml.Event]) -> Iterator[yaml.Event]:
        while not isinstance(event := next(self._events), end):
            yield event


def _scalar(event: yaml.Event) -> Json:
    assert isinstance(event, yaml.ScalarEvent)  # noqa: S101 - no other event begins a value
    value: str = event.value
    if not event.implicit[0]:
        return value
    tag: str = _PLAIN.resolve(yaml.ScalarNode, value, (True, False))  # type: ignore[no-untyped-call]
    kind = tag.removeprefix(_TAG)
    if kind == "str":
        return value
    if kind == "null":
        return None
    if kind == "bool":
        return SafeConstructor.bool_values[value.lower()]
    if kind in ("int", "float"):
        return _number(event, kind)
    if kind == "merge":
        raise _refused(event, "a merge key: write the values out")
    raise _refused(event, f"{_excerpt(event)} is not a text, number, true, false or null: put it in quotes")


def _number(event: yaml.ScalarEvent, kind: str) -> int | float:
    node = yaml.ScalarNode(_TAG + kind, event.value)
    if len(event.value) <= _MAX_NUMBER:
        try:
            number: int | float = (_MAKE.construct_yaml_int if kind == "int" else _MAKE.construct_yaml_float)(node)
        except (ValueError, OverflowError):
            # YAML's grammar of numbers lets things pass that are none, such as 0x_.
            number = math.nan
        if isinstance(number, float) and math.isfinite(number):
            return number
        if isinstance(number, int) and -(2**63) <= number < 2**63:
            return number
    raise _refused(event, f"the number {_excerpt(event)} is not finite or too long: put it in quotes if it is a text")


def _excerpt(event: yaml.Event) -> str:
    text = repr(getattr(event, "value", "[...]"))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refused(event: yaml.Event, why: str) -> NotPlainYaml:
    line = "" if event.start_mark is None else f"line {event.start_mark.line + 1}: "
    return NotPlainYaml(f"{line}{why}")
