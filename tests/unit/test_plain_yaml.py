"""YAML of a tenant: what JSON can say is read, all else is refused in words, and no small text is ever large."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from kvpilot_operator.probes.plain_yaml import MAX_DEPTH, MAX_NODES, NotPlainYaml, read

TAGS = (
    *("!!int", "!!float", "!!bool", "!!null", "!!timestamp", "!!binary", "!!set", "!!omap", "!!pairs", "!!merge"),
    *("!x", "!", "!!python/object/apply:os.getcwd", "!!python/name:os.system"),
)
WORDS = (
    *(
        "a",
        "<<",
        "=",
        "~",
        "null",
        "yes",
        "maybe",
        "1",
        "0x_",
        "0x" + "f" * 40,
        "1e999",
        ".nan",
        "-.inf",
        "1_0",
        "1:59",
    ),
    *(
        "2026-01-01",
        "12 of 3",
        "'q'",
        '"\\ud800"',
        '"\\x00"',
        "*a",
        "&a",
        "&a x",
        "|\n  x",
        "%",
        "@",
        "`",
        "?",
        ":",
        "-",
    ),
    *("#", ",", "[", "]", "{", "}", "\n", " ", "\n  ", "\t", "---", "...", "\ufeff", "\u2028", "\ud800", *TAGS),
)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cn", "Co")), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc ~1é<", max_size=4), inner, max_size=4),
    max_leaves=12,
)


def tagged(value: Any, tags: list[str]) -> str:
    """Flow YAML of a JSON value, with one of `tags` before each node while there are any."""
    tag = tags.pop() if tags else ""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"? {tagged(k, tags)} : {tagged(v, tags)}" for k, v in value.items()) + "}"
    elif isinstance(value, list):
        text = "[" + ", ".join(tagged(item, tags) for item in value) + "]"
    else:
        text = json.dumps(value)
    return f"{tag} {text}"


def answer(text: str) -> Any:
    """What the text says, or None where it is refused as it should be."""
    try:
        return read(text)
    except NotPlainYaml as error:
        assert 0 < len(str(error)) < 500
        return None


def values(found: Any) -> int:
    """Values and keys in a JSON value."""
    if isinstance(found, dict):
        return 1 + sum(1 + values(item) for item in found.values())
    return 1 + sum(map(values, found)) if isinstance(found, list) else 1


@given(json_values)
def test_what_json_says_is_read_as_it_is(value: Any) -> None:
    assert read(yaml.safe_dump(value, allow_unicode=True)) == value


@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=40), st.sampled_from(["", " ", "\n", "\n- "]))
def test_any_text_is_read_in_proportion_or_refused(words: list[str], between: str) -> None:
    text = between.join(words)
    found = answer(text)
    json.dumps(found, allow_nan=False).encode()
    assert values(found) <= len(text) + 1


@given(json_values, st.lists(st.sampled_from(TAGS), min_size=1, max_size=4), st.lists(st.just(""), max_size=3))
def test_a_value_with_a_tag_anywhere_in_it_is_refused(value: Any, tags: list[str], before: list[str]) -> None:
    order = [*reversed(tags), *before]
    text = tagged(value, order)
    assume(len(order) < len(tags))  # else the value has too few nodes for any tag
    with pytest.raises(NotPlainYaml):
        read(text)


@given(st.recursive(st.sampled_from(["x", "*a", "1"]), lambda i: st.lists(i, min_size=1, max_size=3), max_leaves=9))
def test_no_anchor_and_no_alias_is_followed(shape: Any) -> None:
    text = f"a: &a [1]\nb: {json.dumps(shape)}".replace('"', "")
    with pytest.raises(NotPlainYaml, match="anchor"):
        read(text)
    if "*a" in text:
        with pytest.raises(NotPlainYaml, match="alias"):
            read(text.replace("&a ", ""))


def test_a_merge_key_is_refused_before_anything_is_merged() -> None:
    bomb = "a: &a {k: 1}\n" + "".join(f"{x}: &{x} {{<<: [{', '.join(['*a'] * 40)}]}}\n" for x in "bcdef")
    assert len(bomb) < 1200
    with pytest.raises(NotPlainYaml, match="line 1: an anchor"):
        read(bomb)
    with pytest.raises(NotPlainYaml, match="a merge key"):
        read("<<: {a: 1}")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("0x1f", 31),
        ("1_000", 1000),
        ("1:30", 90),
        ("1.5", 1.5),
        ("yes", True),
        ("Off", False),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ('"yes"', "yes"),
        ("9223372036854775807", 2**63 - 1),
        ("1e3", "1e3"),
    ],
)
def test_plain_scalars_mean_what_they_mean_in_manifests(text: str, meant: object) -> None:
    assert read(text) == meant
    assert read(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' a second time"),
        ("1: a", "the key '1' is not a text"),
        ("[a]: b", "is not a text"),
        ("a: 9223372036854775808", "the number '9223372036854775808'"),
        ("a: 1.0e+999", "not finite"),
        ("a: 2026-01-01", "'2026-01-01'.*quotes"),
        ("a\n---\nb", "line 2: a second document"),
        ("[" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} levels"),
        ("[" + "a," * MAX_NODES + "]", f"more than {MAX_NODES} values"),
        ("[1", "not YAML"),
    ],
)
def test_what_is_refused_is_named_with_its_line_and_a_remedy(text: str, words: str) -> None:
    with pytest.raises(NotPlainYaml, match=words):
        read(text)


def test_as_much_as_is_allowed_is_read() -> None:
    assert len(read("[" + "a," * (MAX_NODES - 1) + "]")) == MAX_NODES - 1
    assert json.dumps(read("[" * MAX_DEPTH + "]" * MAX_DEPTH)) == "[" * MAX_DEPTH + "]" * MAX_DEPTH
