"""Terminal output of `kubectl kvpilot`: no text can inject control codes, and no JSON shape raises an exception."""

import copy
import functools
import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from shown_services import COLOURED, PLAIN, detailed, now, story

from kvpilot_kubectl import show


def test_a_message_cannot_control_the_terminal_or_break_its_line() -> None:
    obj = copy.deepcopy(story()["serving"])
    obj["status"]["conditions"][0]["message"] = "a\x1b]0;owned\x07b\nc\x9bd\u202ee [red]not markup[/red] :smile:"
    (line,) = (line for line in detailed(obj).splitlines() if "owned" in line)
    assert line.endswith("a ]0;owned b c d e [red]not markup[/red] :smile:")


def test_a_narrow_terminal_wraps_only_messages() -> None:
    narrow = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=60)
    lines = show.rendered(show.detailed(story()["denied"], now()), narrow).splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("AccuracyVerified ") for line in lines)
    table = [show.listed(list(story().values()), everywhere=False)]
    assert show.rendered(table, narrow, fold=False) == show.rendered(table, PLAIN)


def test_colours_are_used_only_on_terminals() -> None:
    parts = show.detailed(story()["denied"], now())
    assert "\x1b[" in show.rendered(parts, COLOURED)
    assert "\x1b" not in show.rendered(parts, PLAIN)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.datetimes().map(str),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every path in a JSON value."""
    yield path
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from places(value[key], (*path, key))


@st.composite
def odd_objects(draw: st.DrawFn) -> Any:
    """Return a real object in which some parts are replaced or missing."""
    obj = copy.deepcopy(draw(st.sampled_from(sorted(story().items())))[1])
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from([one for one in places(obj) if one]))
        inner = functools.reduce(lambda value, key: value[key], path[:-1], obj)
        if draw(st.booleans()):
            inner[path[-1]] = draw(ANY)
        else:
            del inner[path[-1]]
    return obj


@pytest.mark.slow
@given(odd_objects() | ANY)
def test_any_object_can_be_shown_without_an_error(obj: Any) -> None:
    for console in (PLAIN, COLOURED):
        parts = [show.listed([obj], everywhere=True), *show.detailed(obj, now())]
        text = show.rendered([*parts, *show.timeline(obj, now())], console)
        text.encode()
        assert not re.search(r"[\x00-\x09\x0b-\x1a\x1c-\x1f\x7f-\x9f]", text)
    assert "\x1b" not in show.rendered(parts, PLAIN)
