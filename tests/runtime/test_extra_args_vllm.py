"""The operator treats every spelling of a vLLM option in spec.engine.extraArgs in the same way as the option itself."""

from argparse import Action
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvpilot_formats.arguments import rules
from kvpilot_operator.api.faults import faults
from kvpilot_runtime import serve
from support.bad_manifests import GOOD

if not version("vllm").startswith("0.32."):
    pytest.skip("each version has its own arguments; the API's rules are those of 0.32", allow_module_level=True)
make_arg_parser = import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser

REFUSED = {name.removeprefix("--").replace("-", "_") for one in rules.RESERVED for name in one.options}
"""Refused options: destinations in vLLM, and options of kvpilot-serve."""


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def refused(item: str, nodes: int = 1) -> bool:
    """Return True if the operator refuses an item of extraArgs."""
    spec = {**GOOD["spec"], "engine": {"image": "i", "nodes": nodes, "extraArgs": [item]}}
    return faults({**GOOD, "spec": spec}) != ()


def set_to(name: str, action: Action) -> str:
    return name if action.nargs == 0 else f"{name}=1"


def options(parser: FlexibleArgumentParser) -> dict[str, Action]:
    """Return every option under each of its full names. --no-x may turn off something that kvpilot needs."""
    return {
        name: action
        for name, action in parser._option_string_actions.items()
        if not name.startswith(("--no-", "--help"))
    }


def beginnings(parser: FlexibleArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield each prefix that the parser accepts as an option, with that option's destination."""
    named = options(parser)
    for name, action in named.items():
        for length in range(3 if name.startswith("--") else 2, len(name) + 1):
            beginning = name[:length]
            meant = {id(found[0]) for found in parser._get_option_tuples(beginning)}
            if beginning in named:
                meant = {id(named[beginning])}
            if meant == {id(action)}:
                yield beginning, action.dest


def test_every_spelling_of_a_refused_option_is_refused(parser: FlexibleArgumentParser) -> None:
    tried = [beginning for beginning, dest in beginnings(parser) if dest in REFUSED]
    assert {"--api-k", "--kv-cache-dtype", "--served-model", "-tp", "--device-memory-utilization"} <= set(tried)
    slipped = []
    for beginning in tried:
        underscores = f"--{beginning[2:].replace('-', '_')}" if beginning.startswith("--") else beginning
        spellings = {f"{name}{end}" for name in (beginning, underscores) for end in ("", "=1", ".key=1", ".key+=1")}
        slipped += [spelling for spelling in sorted(spellings) if not refused(spelling)]
    assert slipped == []


def test_no_option_besides_the_reserved_ones_is_refused(parser: FlexibleArgumentParser) -> None:
    others = [(name, action) for name, action in options(parser).items() if action.dest not in REFUSED]
    assert len(others) > 200
    assert [name for name, action in others if name != "-h" and refused(set_to(name, action))] == []


BESIDE_NODES = {
    *("pipeline_parallel_size", "prefill_context_parallel_size", "distributed_executor_backend", "master_addr"),
    *("master_port", "data_parallel_address", "data_parallel_backend", "data_parallel_rpc_port", "data_parallel_size"),
    *("data_parallel_size_local", "data_parallel_supervisor_port", "speculative_config", "spec_method", "spec_model"),
    *("spec_tokens", "kv_offloading_backend", "kv_offloading_size", "kv_transfer_config"),
}


def test_with_several_nodes_every_spelling_of_an_unsupported_option_is_refused(
    parser: FlexibleArgumentParser,
) -> None:
    actions = {action.dest: action for action in options(parser).values()}
    tried = [(set_to(name, actions[dest]), dest in BESIDE_NODES) for name, dest in beginnings(parser)
             if dest not in REFUSED]  # fmt: skip
    assert {"-sc=1", "-dpl=1", "--pi=1", "--specu=1"} <= {name for name, beside in tried if beside}
    assert actions.keys() >= BESIDE_NODES
    assert [name for name, beside in tried if refused(name, nodes=2) != beside] == []
    assert not refused("-dp=2")


def test_an_abbreviated_name_sets_the_option_in_vllm(parser: FlexibleArgumentParser) -> None:
    assert parser.parse_args(["--api_k=secret"]).api_key == ["secret"]
    assert parser.parse_args(["--api-key.a=b"]).api_key == ['{"a": "b"}']


@pytest.mark.parametrize("item", ["$(OPTION)", "--$(NAME)=1", "--chat-template$(REST)"])
def test_an_option_named_by_a_variable_is_refused(item: str) -> None:
    assert refused(item)


CHECKED = {
    "model": "n", "revision": "r", "dtype": "float16", "kv_cache_dtype": "k4v4", "kv_cache_dtype_skip_layers": "0",
    "max_model_len": "4096", "tensor_parallel_size": "2", "gpu_memory_utilization": "0.5",
    "kv_cache_memory_bytes": "64",
}  # fmt: skip
"""Options that kvpilot-serve checks before the start, by vLLM's destination, with a value that is not the default."""


def test_every_spelling_of_a_checked_option_is_checked(parser: FlexibleArgumentParser) -> None:
    tried = 0
    for beginning, dest in beginnings(parser):
        if dest not in CHECKED:
            continue
        checked = serve.parse(["--model=m", f"--{dest.replace('_', '-')}={CHECKED[dest]}"])
        underscores = f"--{beginning[2:].replace('-', '_')}" if beginning.startswith("--") else beginning
        for spelled in ((f"{beginning}={CHECKED[dest]}",), (underscores, CHECKED[dest])):
            assert serve.parse(["--model=m", *spelled]) == checked, spelled
            tried += 1
    assert tried > 100


def test_options_that_kvpilot_serve_does_not_check_are_passed_to_vllm_unchanged(parser: FlexibleArgumentParser) -> None:
    for name, action in options(parser).items():
        if action.dest not in {*CHECKED, "config", "help"}:
            assert set_to(name, action) in serve.parse(["--model=m", set_to(name, action)])[1]
