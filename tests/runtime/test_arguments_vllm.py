"""Our parser of vLLM's arguments knows the same options as vLLM's own parser, and reads any arguments the same way."""

import importlib.util
import json
import re
from argparse import Action, ArgumentTypeError
from collections.abc import Iterator
from contextlib import redirect_stderr
from importlib import resources
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_readable_int

from kvpilot_formats.arguments import Arguments, read, whole_number

if not version("vllm").startswith("0.32."):
    pytest.skip("each version has its own arguments; ours are those of 0.32", allow_module_level=True)

_SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_arguments.py"
_SPEC = importlib.util.spec_from_file_location("vllm_arguments", _SCRIPT)
assert _SPEC is not None
assert _SPEC.loader is not None
vllm_arguments = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(vllm_arguments)

REAL: FlexibleArgumentParser = vllm_arguments.real_parser()
TABLE: dict[str, Any] = vllm_arguments.table(REAL)


class Seen(Action):
    """Action that keeps the values of argparse, whatever their type."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        assert option_string is not None
        listed = values if isinstance(values, list) else [] if values is None else [values]
        if option_string.startswith("-"):
            parser.seen.append((self.dest, tuple(listed), option_string.startswith("--no-")))


def recording() -> FlexibleArgumentParser:
    """Return vLLM's parser class with names and value counts of vLLM's options, without their types."""
    parser = FlexibleArgumentParser(prog="vllm serve", add_help=False)
    parser.add_argument("model_tag", nargs="?")
    for action in REAL._actions:
        if action.option_strings:
            parser.add_argument(*action.option_strings, nargs=action.nargs, action=Seen, dest=action.dest)
    return parser


RECORDING = recording()
DEST = {action.option_strings[0]: action.dest for action in REAL._actions if action.option_strings}
NAMES = {name: DEST.get(name) or next(a.dest for a in REAL._actions if name in a.option_strings) for name in TABLE}


def theirs(arguments: list[str]) -> list[tuple[str, tuple[str, ...], bool]] | None:
    """Return the options that vLLM's parser reads, or None if it rejects the arguments."""
    RECORDING.seen = []
    try:
        with redirect_stderr(StringIO()):
            RECORDING.parse_args(["a-model", *arguments])
    except (SystemExit, IndexError):
        return None
    return list(RECORDING.seen)


def ours(found: Arguments) -> list[tuple[str, tuple[str, ...], bool]]:
    return [(NAMES[one.name], one.values, one.off) for one in found.given]


def test_the_committed_table_of_options_matches_the_installed_vllm() -> None:
    committed = json.loads((resources.files("kvpilot_formats.arguments") / "vllm.json").read_text())
    assert committed == {"vllm": version("vllm").partition("+")[0], "options": TABLE}, f"run {_SCRIPT.name}"


def beginnings() -> Iterator[str]:
    """Yield each name, and its beginnings until one is unique. Longer beginnings are read in the same way."""
    names = [name for action in REAL._actions for name in action.option_strings]
    for name in names:
        yield name
        for length in range(2, len(name)):
            yield name[:length]
            if sum(other.startswith(name[:length]) for other in names) == 1:
                break


def test_every_abbreviation_of_every_option_is_parsed_as_vllm_parses_it() -> None:
    tried = sorted(set(beginnings()) - {"--config"})  # vLLM would read the named file, but kvpilot rejects this option
    assert len(tried) > 1000
    for beginning in tried:
        arguments = [f"{beginning}=x"]
        found = read(arguments)
        if (expected := theirs(arguments)) is None:
            # Python 3.11 rejects -t=2 for -tp=2, and later versions accept it. It is harmless that our parser accepts
            # it, too.
            later = re.fullmatch("-[a-z]+=x", arguments[0])
            assert found.faults or not found.given or later, arguments
        else:
            assert (ours(found), found.faults) == (expected, ()), arguments


words = st.sampled_from(sorted({name for action in REAL._actions for name in action.option_strings} - {"--config"}))
spelled = st.builds(lambda name, cut: name[: max(2, len(name) - cut)], words, st.sampled_from([0, 0, 0, 1, 3, 6]))
underscored = spelled.map(lambda name: f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name)
values = st.sampled_from(
    ["1", "x", "-1", "-0.5", "a b", '{"a": {"b": 1}}', "8k", "[1,2]", "", "-", "x,y", "a.b", "null"]
)
keys = st.sampled_from([".a", ".a.b", ".a_b", ".list+", ".a+", "."])
items = st.one_of(
    spelled, underscored, values,
    st.builds("{}={}".format, st.one_of(spelled, underscored), values),
    st.builds("{}{}".format, st.one_of(spelled, underscored), keys),
    st.builds("{}{}={}".format, st.one_of(spelled, underscored), keys, values),
    st.sampled_from(["-O3", "-O", "-O=2", "-n2", "-qawq", "-tp2", "--unknown", "--unknown=1", "--", "-z"]),
)  # fmt: skip


@given(st.lists(items, max_size=6))
@settings(max_examples=400, deadline=None)
@example(["--speculative-config", '{"method": "ngram"}', "--speculative_config.method", "eagle"])
@example(["--enable-lora", "--no-enable-lora"])
@example(["--kv-cache-dtype-skip-layers", "0", "1", "--max-num-seqs", "8"])
@example(["--kv-transfer-config.a+", "x,y", "--kv-transfer-config.a+=z"])
def test_any_arguments_are_parsed_as_vllm_parses_them(arguments: list[str]) -> None:
    found = read(arguments)
    expected = theirs(arguments)
    if expected is not None:
        assert ours(found) == expected
        assert found.faults == ()
    assert {place for one in found.given for place in one.places} <= set(range(len(arguments)))


@given(st.lists(items, max_size=6))
@settings(max_examples=200, deadline=None)
def test_vllm_refuses_all_arguments_that_we_call_faulty(arguments: list[str]) -> None:
    if read(arguments).faults:
        assert theirs(arguments) is None


@given(st.lists(items, max_size=6), st.sampled_from(sorted(TABLE)))
def test_removing_an_option_removes_every_setting_of_the_option(arguments: list[str], name: str) -> None:
    found = read([f"{name}=1" if TABLE[name]["takes"] != "0" else name, *arguments])
    assert found.get(name) is not None or found.faults
    assert read(found.without(name)).get(name) is None or found.faults


@given(st.one_of(st.from_regex(r"\s?[0-9]{1,6}([.][0-9]{1,3})?[kKmMgGtT]?\s?", fullmatch=True), st.text(max_size=6)))
def test_a_number_is_parsed_as_vllm_parses_it(text: str) -> None:
    try:
        expected: int | None = human_readable_int(text)
    except (ValueError, ArgumentTypeError):
        expected = None
    try:
        assert whole_number(text) == expected
    except ValueError:
        assert expected is None
