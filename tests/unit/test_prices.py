"""Prices by kind of GPU: validation, and the reported cost of a service. No decision depends on a price."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_cli.plan.command import main
from kvpilot_operator.decide import decide
from kvpilot_operator.decide.steps.policy import choose_step
from kvpilot_operator.gpus import GPUS, price_key, prices
from kvpilot_operator.options import parse_arguments
from kvpilot_operator.state.objects import DeploymentView
from kvpilot_operator.state.samples import Flows
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Status
from support.policy_inputs import policy_input, workload
from support.services import manifest, running, samples

LOAD = ["--requests-per-second", "5", "--prompt-tokens", "2000", "--generated-tokens", "2000"]


def test_a_kind_is_named_as_the_table_or_the_node_label_has_it() -> None:
    assert prices([("h200", 3.5), ("NVIDIA-L40S", 1)]) == {"H200": 3_500_000, "L40S": 1_000_000}


def test_a_gpu_that_the_table_does_not_know_has_the_price_of_its_node_label() -> None:
    given_prices = {"GB200": 9, "NVIDIA-B300-SXM6": 7.5, "amd.com/gpu": 2}
    known = prices(given_prices.items())
    for label, price in (("NVIDIA-GB200", 9), ("NVIDIA-B300-SXM6", 7.5), ("amd.com/gpu", 2)):
        assert known[price_key(label)] == price * 1e6
    assert price_key("NVIDIA-H200-MIG-1g.18gb") not in prices([("H200", 3.5)])


BAD = [
    ([("H 200", 1.0)], "prices.H 200: is not the name of a GPU; use H200, or a node's label gpu.product"),
    ([("GB200", 1.0), ("NVIDIA-GB200", 2.0)], "prices.NVIDIA-GB200: GB200 has a price already; remove one of them"),
    ([("H200", -1.0)], "prices.H200: -1.0 is not a price; give a number above 0"),
    ([("H200", 0)], "prices.H200: 0 is not a price"),
    ([("H200", math.nan)], "prices.H200: nan is not a price"),
    ([("H200", math.inf)], "prices.H200: inf is not a price"),
    ([("H200", 10**400)], "prices.H200: 1000"),
    ([("H200", True)], "prices.H200: True is not a price"),
    ([("H200", "3.5")], "prices.H200: '3.5' is not a price"),
    ([("H200", None)], "prices.H200: None is not a price"),
    ([("H200", 1.0), ("NVIDIA-H200", 2.0)], "prices.NVIDIA-H200: H200 has a price already; remove one of them"),
]


@pytest.mark.parametrize(("given_prices", "said"), BAD)
def test_a_wrong_price_is_refused_with_field_value_and_remedy(given_prices, said) -> None:
    with pytest.raises(ValueError, match="prices") as caught:
        prices(given_prices)
    assert said in str(caught.value)


@given(st.dictionaries(st.sampled_from([g.name for g in GPUS]), st.floats(0.001, 1e6)))
def test_whatever_is_a_price_is_kept_to_a_millionth(table) -> None:
    assert {kind: micros / 1e6 for kind, micros in prices(table.items()).items()} == pytest.approx(table, abs=1e-6)


@pytest.mark.parametrize("text", ["H200: -1", "H200: .nan", "[1]", "", "a: b: c", "H 200: 1", "1: 2"])
def test_the_operator_does_not_start_with_prices_that_cannot_be_used(text, tmp_path, capsys) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit):
        parse_arguments([f"--prices={file}"])
    assert "argument --prices: " in capsys.readouterr().err


def priced(status: Status | None = None, **changes: object) -> Snapshot:
    obj = manifest(engine={"image": "kvpilot/runtime:1", "tensorParallelSize": 2})
    s = running(obj, "auto", gpu_hour_micros=3_500_000)
    flows = Flows(5.0, generation_tokens=500, finished=5, prefill_seconds=0.1, decode_seconds=20)
    seen = tuple(replace(one, flows=flows) for one in samples(usage=0.3, waiting=0))
    s = replace(s, samples={s.traffic: seen}, deployments={s.traffic: DeploymentView(s.traffic, "auto", 1)})
    return replace(s, **({"status": status} if status else {}), **changes)


def test_a_service_says_what_it_costs_an_hour_and_a_million_generated_tokens() -> None:
    figures = decide(priced()).figures
    assert figures.cost_per_hour == 7
    # 7 an hour, for 100 tokens a second.
    assert figures.cost_per_million_tokens == pytest.approx(7 / 0.36)
    free = decide(priced(gpu_hour_micros=None)).figures
    assert (free.cost_per_hour, free.cost_per_million_tokens) == (None, None)


def test_a_decision_says_what_each_step_would_have_cost() -> None:
    decision = choose_step(policy_input(gpu_hour_micros=3_500_000))
    assert (
        "an hour costs: fp8 at 1 3.50, k8v4 at 1 3.50, k4v4 at 1 3.50, auto at 2 7.00, auto at 1 3.50"
        in decision.message
    )
    assert "costs" not in choose_step(policy_input()).message
    held = choose_step(policy_input(workload("ComputeBound"), gpu_hour_micros=3_500_000, ready=0))
    assert held.hold is not None
    assert "costs" not in held.hold
    assert "an hour costs: " in held.message


def test_a_plan_is_priced_by_the_hour_and_by_the_million_tokens(capsys) -> None:
    plan = ["Llama-3.1-8B", "--gpu", "L40S", *LOAD]
    assert main([*plan, "--price", "1.1"]) == 0
    told = capsys.readouterr().out
    assert "1.1 an hour" in told
    row = next(line for line in told.splitlines() if line.startswith("k4v4") and "time per token" in line).split()
    assert row[2:5] == ["6", "6.60", "0.183"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([*LOAD, "--price", "-1"], "--price: '-1' is not a positive number"),
        ([*LOAD, "--price", "nan"], "--price: 'nan' is not a positive number"),
        ([*LOAD, "--price", "L40S=1"], "--price: 'L40S=1' is not a positive number"),
        (["--price", "1"], "--requests-per-second and --prompt-tokens and --generated-tokens: missing"),
    ],
)
def test_a_wrong_price_of_a_plan_is_refused_in_one_line(capsys, more, said) -> None:
    assert main(["Llama-3.1-8B", "--gpu", "L40S", *more]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
