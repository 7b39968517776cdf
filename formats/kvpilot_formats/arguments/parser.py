"""Parser of vLLM's arguments, in pure Python.

vLLM accepts an underscore for a dash, any unique prefix of a name, `-n2`, `-O3`, and values after `=` or in the next
items. It also accepts `--option.key value` for one key of a JSON value. A parser that does not know one of these
spellings overlooks the option. So this module follows vLLM's parser and argparse step by step, and a property test
compares the results of both.
"""

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

KVPILOT = ("--recent-tokens",)
"""Options that only kvpilot-serve has. Each takes one value, and its name cannot be abbreviated."""

_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_LEVEL = "--optimization-level"
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Option(NamedTuple):
    """An option of vLLM's command line. `name` is its main name."""

    name: str
    takes: str
    """Number of values, as in argparse: "0", "1", "?" (0 or 1) or "+" (1 or more)."""
    off: bool = False
    """True for a `--no-...` name."""


class Given(NamedTuple):
    """Option that the parsed arguments set. `name` is its main name."""

    name: str
    values: tuple[str, ...]
    """Values of the option; empty for a flag."""
    off: bool
    places: tuple[int, ...]
    """Indices of the arguments that set the option."""


class Fault(NamedTuple):
    """Argument that vLLM's parser would refuse: its index (`place`), and a message with the reason and a remedy."""

    place: int
    message: str


class _Word(NamedTuple):
    text: str
    places: tuple[int, ...]


@dataclass(frozen=True)
class Arguments:
    """Parsed list of arguments. If an option is given several times, the last one counts."""

    items: tuple[str, ...]
    given: tuple[Given, ...]
    """Options that the arguments set, in the order in which vLLM reads them."""
    faults: tuple[Fault, ...]
    """Arguments that vLLM would refuse. An option that vLLM 0.32 does not have is not a fault."""

    def get(self, name: str) -> Given | None:
        """Return the last setting of an option, which is the one that counts; None if it is not set."""
        return next((one for one in reversed(self.given) if one.name == name), None)

    def value(self, name: str) -> str | None:
        """Return the option's last value; None if it is not set, or is set without a value."""
        found = self.get(name)
        return found.values[-1] if found is not None and found.values else None

    def on(self, name: str) -> bool:
        """Return True if the option is set and not turned off."""
        found = self.get(name)
        return found is not None and not found.off

    def count(self, name: str) -> int:
        """Return the option's value as a number. Return 1 if it is not set, not a number, or below 1."""
        try:
            return max(1, whole_number(self.value(name) or ""))
        except ValueError:
            return 1

    def mapping(self, name: str) -> dict[str, Any]:
        """Return the option's value as a JSON object; empty if it is not set or not an object."""
        try:
            found = json.loads(self.value(name) or "")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def without(self, *options: str) -> list[str]:
        """Return the arguments without those that set one of these options."""
        left_out = {place for one in self.given if one.name in options for place in one.places}
        return [item for place, item in enumerate(self.items) if place not in left_out]


def whole_number(text: str) -> int:
    """Parse a whole number as vLLM does: 8192, 8k (8,000), 8K (8,192), 2.5k. Raise ValueError if vLLM would."""
    text = text.strip()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text)
    if found is None:
        return int(text)
    if found[2] in _DECIMAL:
        number = float(found[1]) * _DECIMAL[found[2]]
        if math.isinf(number):
            raise ValueError(f"{text[:20]}... is beyond any number")
        return int(number)
    return int(found[1]) * _BINARY[found[2]]


@functools.cache
def _options() -> Mapping[str, Option]:
    """Return vLLM's options by full name, including aliases and `--no-...` names."""
    text = (resources.files("kvpilot_formats.arguments") / "vllm.json").read_text()
    found: dict[str, Option] = {}
    for name, row in json.loads(text)["options"].items():
        for spelled in (name, *row.get("also", ())):
            found[spelled] = Option(name, row["takes"])
        if "off" in row:
            found[row["off"]] = Option(name, row["takes"], off=True)
    return found


def names(option: str) -> tuple[str, ...]:
    """Return all full names that turn an option on, the main name first."""
    if option in KVPILOT:
        return (option,)
    return tuple(spelled for spelled, row in _options().items() if row.name == option and not row.off)


def read(arguments: Iterable[str]) -> Arguments:
    """Parse arguments. This never raises an error: faults are in `Arguments.faults`."""
    return _read(tuple(arguments))


@functools.lru_cache(maxsize=256)
def _read(items: tuple[str, ...]) -> Arguments:
    faults: list[Fault] = []
    words = _merged(list(_spelled(items)), faults)
    given = tuple(_consumed(words, faults))
    return Arguments(items, given, tuple(faults))


def _spelled(items: Sequence[str]) -> Iterator[_Word]:
    """Yield the arguments with dashes instead of underscores in option names, and `-O` as `--optimization-level`."""
    for place, item in enumerate(items):
        here = (place,)
        if item.startswith("--help="):
            yield _Word("--help", here)
        elif item.startswith("--"):
            name, equals, value = item.partition("=")
            first, dot, keys = name.partition(".")
            yield _Word(first.replace("_", "-") + dot + keys + equals + value, here)
        elif item.startswith("-O") and item != "-O":
            yield _Word(_LEVEL, here)
            yield _Word(item[3:] if item[2] == "=" else item[2:], here)
        elif item == "-O" and items[place + 1 : place + 2] and items[place + 1] in ("0", "1", "2", "3"):
            yield _Word(_LEVEL, here)
        else:
            yield _Word(item, here)


def _merged(words: list[_Word], faults: list[Fault]) -> list[_Word]:
    """Merge all `--option.key value` of an option into one JSON value at the end of the list, as vLLM does."""
    kept: list[_Word] = []
    found: dict[str, tuple[dict[str, Any], list[int]]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.text.partition("=")
        if not word.text.startswith("-") or "." not in name:
            kept.append(word)
            continue
        places = list(word.places)
        if not equals:
            after = next(rest, None)
            if after is None:
                faults.append(Fault(word.places[0], f"{name} needs a value: add it after ="))
                continue
            value, places = after.text, [*places, *after.places]
        option, *keys = name.removesuffix("+").split(".")
        part: Any = value.split(",") if name.endswith("+") else _json(value)
        for key in reversed(keys):
            part = {key: part}
        whole, since = found.setdefault(option, ({}, []))
        _update(whole, part)
        since += places
    for option, (whole, since) in found.items():
        kept += [_Word(option, tuple(since)), _Word(json.dumps(whole), tuple(since))]
    return kept


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return whole_number(text)
    except ValueError:
        return text


def _update(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, dict) and isinstance(whole.get(key), dict):
            _update(whole[key], value)
        elif isinstance(value, list) and isinstance(whole.get(key), list):
            whole[key] = whole[key] + value
        else:
            whole[key] = value


def _consumed(words: Sequence[_Word], faults: list[Fault]) -> Iterator[Given]:
    """Yield the options with the values that argparse assigns to them."""
    dashes = next((index for index, word in enumerate(words) if word.text == "--"), len(words))
    # Words after a lone "--" do not belong to any option.
    kinds = [_option(word, faults) if index < dashes else None for index, word in enumerate(words)]
    at, unknown = 0, False
    while at < len(words):
        word, kind = words[at], kinds[at]
        at += 1
        if kind is None:
            if not unknown and at - 1 != dashes:
                faults.append(Fault(word.places[0], _stray(word.text)))
            continue
        option, value = kind
        unknown = option is None
        if option is None:
            continue
        end = at
        if value is None:
            most = {"0": 0, "1": 1, "?": 1, "+": len(words)}[option.takes]
            while end < dashes and end - at < most and kinds[end] is None:
                end += 1
        values = (value,) if value is not None else tuple(one.text for one in words[at:end])
        places = sorted({place for one in words[at - 1 : end] for place in one.places})
        at = end
        if option.takes == "0" and values:
            faults.append(Fault(word.places[0], f"{option.name} takes no value: remove = and the text after it"))
        elif option.takes in "1+" and not values:
            faults.append(Fault(word.places[0], f"{option.name} needs a value: add it after ="))
        else:
            yield Given(option.name, values, option.off, tuple(places))


def _stray(text: str) -> str:
    name = re.match(r"\s*(--?[A-Za-z][\w.-]*)\s", text)
    if name is not None:
        return f"{name[1]} and its value are in one item, with a space between them: write OPTION=VALUE, or two items"
    return "an argument belongs to no option: write OPTION=VALUE in one item, or remove it"


def _option(word: _Word, faults: list[Fault]) -> tuple[Option | None, str | None] | None:
    """Return the option that a word names, and the value in the same word (`--x=1`, `-n2`) or None.

    Return (None, None) for an unknown or an ambiguous option, and add an ambiguous one to `faults`. Return None if the
    word is a value.
    """
    text, table = word.text, _options()
    if not text.startswith("-"):
        return None
    name, equals, value = text.partition("=")
    given = value if equals else None
    if name in KVPILOT:
        return Option(name, "1"), given
    if text in table:
        return table[text], None
    if len(text) == 1:
        return None
    if equals and name in table:
        return table[name], value
    meant = list(_beginning(text))
    if len(meant) > 1:
        some = " or ".join(spelled for spelled, _ in meant[:3])
        faults.append(Fault(word.places[0], f"{name} may be {some}: write the option in full"))
        return None, None
    if meant:
        return table[meant[0][0]], meant[0][1]
    return None if _NUMBER.fullmatch(text) or " " in text else (None, None)


def _beginning(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield each option that `text` abbreviates, by its full name, and the value after `=` in `text`, or None."""
    name, equals, value = text.partition("=")
    given = value if equals else None
    for spelled in _options():
        if not text.startswith("--") and spelled == text[:2]:
            yield spelled, text[2:]
        elif spelled.startswith(name):
            yield spelled, given
