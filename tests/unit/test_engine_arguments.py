"""The operator parses spec.engine.extraArgs as vLLM does, by the same rules as kvpilot-serve."""

import json
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_formats.arguments import KVPILOT, names, read, rules
from kvpilot_operator.api import faults as api
from kvpilot_operator.render.engine import pod_template
from support.bad_manifests import GOOD
from support.services import manifest, spec_of

TABLE = json.loads((resources.files("kvpilot_formats.arguments") / "vllm.json").read_text())["options"]
RESERVED = sorted({option for one in rules.RESERVED for option in one.options})
OTHERS = sorted({*TABLE, *KVPILOT} - set(RESERVED) - {"--api-server-count"})


def faults(*arguments: str, **engine: object) -> list[str]:
    spec = {**GOOD["spec"], "engine": {**GOOD["spec"]["engine"], **engine, "extraArgs": list(arguments)}}
    return [fault.field for fault in api.faults({**GOOD, "spec": spec})]


def written(option: str) -> str:
    return option if option in TABLE and TABLE[option]["takes"] == "0" else f"{option}=1"


@pytest.mark.parametrize("option", RESERVED)
def test_every_full_name_of_a_reserved_option_is_a_fault(option: str) -> None:
    for name in names(option):
        for spelled in {name, name.replace("-", "_").replace("__", "--", 1) if name.startswith("--") else name}:
            assert faults(f"{spelled}=1") == ["spec.engine.extraArgs[0]"], spelled


def test_no_option_besides_the_reserved_ones_is_a_fault() -> None:
    assert len(OTHERS) > 150
    assert [option for option in OTHERS if faults(written(option))] == []


def test_rules_about_arguments_name_only_options_that_vllm_has() -> None:
    switches = (*rules.BESIDE_OURS, *rules.BESIDE_LATENT, *rules.BESIDE_DRAFT_MODELS, *rules.BESIDE_CONNECTORS)
    named = {option for switch in switches for option in switch.options} | set(RESERVED) | set(rules.SEVERAL_ENGINES)
    assert named - set(KVPILOT) <= set(TABLE)


def test_an_option_that_a_field_sets_is_reserved_unless_users_may_change_it() -> None:
    """`extraArgs` come last, so an option there would replace the field's option."""
    model = {"source": "hf://a/b", "revision": "c", "maxModelLen": 4096,
             "adapters": [{"name": "sql", "source": "file:///sql"}]}  # fmt: skip
    cache = {"mode": "Fixed", "dtype": "k4v4", "recentTokens": 64, "skipLayers": ["0"]}
    spec = spec_of(manifest(model=model, kvCache=cache))
    (container,) = pod_template("chat", spec, "k4v4")["spec"]["containers"]
    found = {option.name for option in read(container["args"]).given}
    assert found - set(RESERVED) == {"--lora-modules", "--enable-lora", "--max-loras"}
    assert "--recent-tokens" in found and "--revision" in found


@given(st.sampled_from(RESERVED), st.integers(0, 40), st.booleans())
def test_every_abbreviation_of_a_reserved_option_is_a_fault(option: str, cut: int, apart: bool) -> None:
    beginning = option[: max(3, len(option) - cut)]
    found = read([f"{beginning}=1"])
    if option in KVPILOT and beginning != option:
        assert not any(one.name == option for one in found.given)
    elif found.given and found.given[0].name == option:
        assert faults(*([beginning, "1"] if apart else [f"{beginning}=1"])) == ["spec.engine.extraArgs[0]"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--enforce-eager", "--max-num-seqs=16", "--kv-cache-memory-bytes=64M"],
        ["--chat-template=a b", "--api-server-count=2", "-asc", "1"],
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'],
        ["--seed", "-1", "--no-enable-prefix-caching", "-O3", "-q", "awq"],
        ["--an-option-of-a-newer-vllm", "8", "--another=x"],
        ["--max-lora-rank=64", "--dtype=$(DTYPE)"],
    ],
)
def test_arguments_that_vllm_accepts_have_no_fault(arguments: list[str]) -> None:
    assert faults(*arguments) == []


@pytest.mark.parametrize("arguments", [["--max-num-seqs s3cret"], ["s3cret"], ["--api-k=s3cret"], ["--max-n=s3cret"]])
def test_the_message_about_a_refused_argument_repeats_no_value(arguments: list[str]) -> None:
    spec = {**GOOD["spec"], "engine": {**GOOD["spec"]["engine"], "extraArgs": arguments}}
    (fault,) = api.faults({**GOOD, "spec": spec})
    assert "s3cret" not in fault.message


@given(
    st.lists(st.text(min_size=1, max_size=30) | st.sampled_from(["--", "-", "-O", "--a.b", "--x.", "-.5"]), max_size=8)
)
def test_any_arguments_are_judged_without_an_error(arguments: list[str]) -> None:
    assert all(field.startswith("spec.engine.extraArgs[") for field in faults(*arguments))
