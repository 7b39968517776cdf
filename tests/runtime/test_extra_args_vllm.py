"""Which of vLLM's arguments spec.engine.extraArgs refuses: every spelling that vLLM's own parser takes is tried."""

from __future__ import annotations

import re
from argparse import Action
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvpilot_operator.api.rules import broken_rules
from kvpilot_operator.api.schema import root_schema
from kvpilot_runtime import serve
from kvpilot_runtime.config import options as options_beside_ours
from kvpilot_runtime.errors import PreflightError

if not version("vllm").startswith("0.32."):
    pytest.skip("each version has arguments of its own; the API's rules are those of 0.32", allow_module_level=True)
make_arg_parser = import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser

ITEM = root_schema()["properties"]["spec"]["properties"]["engine"]["properties"]["extraArgs"]["items"]

SET_BY_KVPILOT = {
    *("model", "revision", "served_model_name", "host", "port", "uds", "kv_cache_dtype", "kv_cache_dtype_skip_layers"),
    *("max_model_len", "tensor_parallel_size", "gpu_memory_utilization", "shutdown_timeout"),
}
HIDE_THE_ENGINE = {
    *("api_key", "root_path", "middleware", "grpc", "grpc_port", "headless", "disable_log_stats"),
    *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
}
PART_OF_AN_ENGINE = {
    *("nnodes", "node_rank", "data_parallel_rank", "data_parallel_start_rank", "data_parallel_external_lb"),
    *("data_parallel_hybrid_lb", "data_parallel_multi_port_external_lb"),
}
REFUSED = SET_BY_KVPILOT | HIDE_THE_ENGINE | PART_OF_AN_ENGINE | {"logprobs_mode", "hf_token", "config"}


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def refused(item: str) -> bool:
    return next(broken_rules(item, ITEM), None) is not None


def options(parser: FlexibleArgumentParser) -> dict[str, Action]:
    """Every option by every full name. --no-x turns something off that kvpilot wants off."""
    return {
        name: action
        for name, action in parser._option_string_actions.items()
        if not name.startswith(("--no-", "--help"))
    }


def beginnings(parser: FlexibleArgumentParser) -> Iterator[tuple[str, str]]:
    """Each beginning of a name that the parser takes for one option, with that option's destination."""
    named = options(parser)
    for name, action in named.items():
        for length in range(3 if name.startswith("--") else 2, len(name) + 1):
            beginning = name[:length]
            meant = {id(found[0]) for found in parser._get_option_tuples(beginning)}
            if beginning in named:
                meant = {id(named[beginning])}
            if meant == {id(action)}:
                yield beginning, action.dest


def test_the_table_names_only_options_that_vllm_has(parser: FlexibleArgumentParser) -> None:
    assert {action.dest for action in options(parser).values()} >= REFUSED


def test_every_spelling_of_a_refused_option_is_refused(parser: FlexibleArgumentParser) -> None:
    tried = [beginning for beginning, dest in beginnings(parser) if dest in REFUSED]
    assert {"--api-k", "--kv-cache-dtype", "--served-model", "-tp", "--device-memory-utilization"} <= set(tried)
    slipped = []
    for beginning in tried:
        underscores = f"--{beginning[2:].replace('-', '_')}" if beginning.startswith("--") else beginning
        spellings = {f"{name}{end}" for name in (beginning, underscores) for end in ("", "=1", ".key=1", ".key+=1")}
        slipped += [spelling for spelling in sorted(spellings) if not refused(spelling)]
    assert slipped == []


def test_no_other_option_is_refused(parser: FlexibleArgumentParser) -> None:
    others = [name for name, action in options(parser).items() if action.dest not in REFUSED]
    assert len(others) > 200
    assert [name for name in others if refused(name) or refused(f"{name}=$(VALUE)")] == []


SPEC = root_schema()["properties"]["spec"]
NODES = {**SPEC, "x-kubernetes-validations": [one for one in SPEC["x-kubernetes-validations"]
         if one["fieldPath"] == ".engine.extraArgs" and "engine.nodes" in one["rule"]]}  # fmt: skip
BESIDE_NODES = {
    *("pipeline_parallel_size", "prefill_context_parallel_size", "distributed_executor_backend", "master_addr"),
    *("master_port", "data_parallel_address", "data_parallel_backend", "data_parallel_rpc_port", "data_parallel_size"),
    *("data_parallel_size_local", "data_parallel_supervisor_port", "speculative_config", "spec_method", "spec_model"),
    *("spec_tokens", "kv_offloading_backend", "kv_offloading_size", "kv_transfer_config"),
}


def refused_beside_nodes(item: str) -> bool:
    return next(broken_rules({"engine": {"nodes": 2, "extraArgs": [item]}}, NODES), None) is not None


def test_every_spelling_of_what_does_not_go_with_several_nodes_is_refused_beside_them_and_no_other_option_is(
    parser: FlexibleArgumentParser,
) -> None:
    tried = [(name, dest in BESIDE_NODES) for name, dest in beginnings(parser) if dest not in REFUSED]
    assert {"-sc", "-dpl", "--pi", "--specu"} <= {name for name, beside in tried if beside}
    assert {dest for _, dest in beginnings(parser)} >= BESIDE_NODES
    long = [name for name, beside in tried if beside and name.startswith("--")]
    tried += [(f"--{name[2:].replace('-', '_')}=1", True) for name in long]
    assert [name for name, beside in tried if refused_beside_nodes(name) != beside] == []
    assert refused_beside_nodes("--retention=SinksAndWindow")
    assert next(broken_rules({"engine": {"nodes": 1, "extraArgs": ["-dp=2"]}}, NODES), None) is None


def test_a_beginning_of_a_name_really_sets_the_option(parser: FlexibleArgumentParser) -> None:
    assert parser.parse_args(["--api_k=secret"]).api_key == ["secret"]
    assert parser.parse_args(["--api-key.a=b"]).api_key == ['{"a": "b"}']


@pytest.mark.parametrize("item", ["$(OPTION)", "--$(NAME)=1", "--chat-template$(REST)"])
def test_an_option_that_a_variable_would_name_is_refused(item: str) -> None:
    assert refused(item)


@pytest.mark.parametrize("item", ["0", "-1", "{}", "priority", "--enable-lora", "--seed=$(SEED)", "--dtype=bfloat16"])
def test_what_is_left_goes_through(item: str) -> None:
    assert not refused(item)


SPECULATION = {"--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"}
OURS = {option for switch in options_beside_ours.REFUSED for option in switch.options} | SPECULATION
OURS |= {options_beside_ours.TRANSFER}


def test_an_option_that_our_dtypes_look_at_is_found_in_every_spelling_and_no_other_is(
    parser: FlexibleArgumentParser,
) -> None:
    dests = {parser._option_string_actions[name].dest for name in OURS}
    tried = list(beginnings(parser))
    assert {"-sc", "-dcp", "--decode-context", "--enable-db"} <= {name for name, dest in tried if dest in dests}
    wrong = [
        name
        for name, dest in tried
        for spelling in (name, f"{name}=x", f"{name}.key=x")
        if any(options_beside_ours.given([spelling], *OURS)) != (dest in dests)
    ]
    assert wrong == []


CHECKED = {
    "model": "n", "revision": "r", "dtype": "float16", "kv_cache_dtype": "k4v4", "kv_cache_dtype_skip_layers": "0",
    "max_model_len": "4096", "tensor_parallel_size": "2", "gpu_memory_utilization": "0.5",
    "kv_cache_memory_bytes": "64",
}  # fmt: skip
"""What kvpilot-serve judges before the start, by vLLM's destination, with a value that is not the default."""


def test_no_spelling_of_what_is_checked_reaches_vllm_unchecked(parser: FlexibleArgumentParser) -> None:
    outcomes: dict[str, str] = {}
    for beginning, dest in beginnings(parser):
        if dest not in CHECKED:
            continue
        checked = serve.parse(["--model=m", f"--{dest.replace('_', '-')}={CHECKED[dest]}"])
        underscores = f"--{beginning[2:].replace('-', '_')}" if beginning.startswith("--") else beginning
        for spelled in ((f"{beginning}={CHECKED[dest]}",), (underscores, CHECKED[dest])):
            try:
                assert serve.parse(["--model=m", *spelled]) == checked
                outcomes[beginning] = "checked"
            except PreflightError as error:
                assert re.match(f"{beginning}: write {beginning}.* in full", error.message)
                outcomes[beginning] = "refused"
    named = set(options(parser))
    assert {one for one, outcome in outcomes.items() if one in named and outcome == "refused"} == set()
    assert {outcomes[one] for one in ("--max-model", "--tensor-par", "--kv-cache-mem", "--device-m")} == {"refused"}
    assert {outcomes[one] for one in ("--max-model-len", "-tp", "--device-memory-utilization")} == {"checked"}


def test_every_other_option_of_vllm_goes_to_it_as_it_is(parser: FlexibleArgumentParser) -> None:
    for name, action in options(parser).items():
        if action.dest not in {*CHECKED, "config", "help"}:
            assert f"{name}=1" in serve.parse(["--model=m", f"{name}=1"])[1]
