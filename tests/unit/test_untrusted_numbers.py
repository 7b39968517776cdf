"""Numbers in external text are parsed correctly or rejected, without an exception."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_formats.untrusted import whole
from kvpilot_operator.decide.load.workload import step_tokens
from kvpilot_operator.decide.steps.capacity import kept_layers
from kvpilot_operator.observe.nodes import node_facts
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts
from support.services import manifest, spec_of

DIGITS = "0123456789²³٣४½Ⅷ+-_. \n"


@given(st.text(DIGITS, max_size=30) | st.text(max_size=10), st.integers(0, 10**12))
def test_only_ascii_digits_up_to_a_bound_are_read_as_a_whole_number(text, most):
    plain = bool(text) and all(digit in "0123456789" for digit in text)
    assert whole(text, most) == (int(text) if plain and int(text) <= most else None)


@pytest.mark.parametrize("text", ["9" * 10_000, "0" * 10_000 + "7" * 9, None, 3, True])
def test_text_that_int_refuses_is_not_a_number(text):
    assert whole(text, 10**6) is None


def test_leading_zeros_do_not_change_a_number():
    assert whole("0" * 10_000 + "42", 100) == 42


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        (["--max-num-batched-tokens=4096"], 4096),
        (["--max-num-batched-tokens", "4096"], 4096),
        (["--max_num_batched_tokens=4096"], 4096),
        (["--max-num-batched=4096"], 4096),
        (["--max-num-batched-tokens=4096", "--max-num-batched-tokens=512"], 512),
        (["--max-num-batched-tokens=8k"], 8000),
        (["--max-num-batched-tokens=8K"], 8192),
        (["--max-num-batched-tokens=2.5k"], 2500),
        (["--max-num-batched-tokens=2.5K"], 2048),
        (["--max-num-batched-tokens=²"], 2048),
        (["--max-num-batched-tokens=٣"], 3),
        (["--max-num-batched-tokens=" + "9" * 900], 2048),
        (["--max-num-batched-tokens=0"], 2048),
        (["--max-num-batched-tokens=-1"], 2048),
        (["--max-num-batched-tokens="], 2048),
        (["--max-num-batched-tokens"], 2048),
        (["--max-num-seqs=4096"], 2048),
    ],
    ids=lambda value: str(value)[:50],
)
def test_the_token_budget_of_a_step_is_parsed_as_vllm_parses_it(arguments, tokens):
    assert step_tokens(spec_of(manifest(engine={"extraArgs": arguments})), NodeFacts()) == tokens


@given(st.text(DIGITS + "kKmMgGtT", max_size=40))
def test_the_token_budget_of_a_step_is_a_number_for_any_argument(text):
    spec = spec_of(manifest(engine={"extraArgs": [f"--max-num-batched-tokens={text}"]}))
    assert 0 < step_tokens(spec, NodeFacts()) < 2**31


@pytest.mark.parametrize("odd", ["²", "٣", "9" * 5000, "-8", "", "8.9"])
def test_a_nodes_label_that_is_not_a_number_is_not_known(odd):
    labels = {
        "nvidia.com/gpu.product": "NVIDIA-H2000",
        "nvidia.com/gpu.compute.major": odd,
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/gpu.memory": odd,
    }
    assert node_facts({"metadata": {"name": "n", "labels": labels}}) == NodeFacts("NVIDIA-H2000", None, None)


@given(st.lists(st.text(DIGITS, max_size=6) | st.just("sliding_window"), max_size=5))
def test_skipped_layers_are_counted_for_any_list(layers):
    model = ModelFacts(head_dim=128, kv_heads=8, layers=32, window_layers=4, mla=False)
    assert 0 <= kept_layers(model, layers) <= 32
