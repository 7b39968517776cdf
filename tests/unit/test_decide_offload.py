"""Host memory for evicted prefixes: when it is better than a dtype or a replica, and hits by tier."""

import json
from dataclasses import replace
from typing import Any

import pytest

from kvpilot_operator.control.service_metrics import rows
from kvpilot_operator.decide import decide
from kvpilot_operator.decide.steps.policy import choose_step
from kvpilot_operator.decide.steps.policy_input import PolicyInput
from kvpilot_operator.state.samples import Flows
from kvpilot_operator.state.snapshot import ModelFacts, Snapshot
from kvpilot_operator.state.status import Option, parse_status
from support.crd import status_faults
from support.policy_inputs import LLAMA, policy_input, spec, workload
from support.services import manifest, running, samples

# KV capacity of Llama-3-8B in 16 bits on one H200 (docs/benchmarks/h200-engine.json): 131,072 bytes a token.
TOKENS = 889_584
OFFLOADED = {"kvCache": {"mode": "Auto", "offload": {"cpuMemoryGiB": 64}}}
QUERIED = 8000.0
KNOWN = Flows(5.0, prompt_tokens=QUERIED, generation_tokens=200, finished=4, prefill_seconds=0.5, decode_seconds=60)


def thrown_out(**changes: Any) -> PolicyInput:
    full = workload(demand=2 * TOKENS, capacity=TOKENS, thrown_out=True, host_hits=0.12)
    return policy_input(full, model=LLAMA, **changes)


def weighed(s: PolicyInput) -> Option:
    (one,) = (option for option in choose_step(s).options if option.action == "Offload")
    return one


def test_where_prefixes_are_thrown_out_host_memory_is_weighed_between_dtype_and_replica() -> None:
    decision = choose_step(thrown_out())
    assert [option.action for option in decision.options][:1] == ["DtypeDown"]
    # The alternatives of the chosen step appear in the order of preference.
    others = [option.action for option in decision.options[1:]]
    assert others == ["DtypeDown", "DtypeDown", "Offload", "ScaleOut", "Stay"]
    one = weighed(thrown_out())
    assert (one.outcome, one.dtype, one.replicas) == ("NotOwner", "auto", 1)
    assert one.capacity_tokens == 2 * TOKENS
    assert "kvCache.offload is not set" in one.message
    # 889,584 tokens of 131,072 bytes are 108.6 GiB.
    assert "with cpuMemoryGiB 109" in one.message


def test_it_takes_no_step_from_anybody() -> None:
    with_it, without = thrown_out(), thrown_out()
    without = replace(without, workload=replace(without.workload, thrown_out=False))
    for changes in ({}, {"spec": spec(kvCache={"mode": "Fixed", "dtype": "auto"})}, {"replicas": 4, "ready": 4}):
        assert choose_step(replace(with_it, **changes)).chosen == choose_step(replace(without, **changes)).chosen


def test_memory_that_binds_for_another_reason_has_no_use_for_it() -> None:
    decision = choose_step(policy_input(workload(demand=2 * TOKENS, capacity=TOKENS), model=LLAMA))
    assert "Offload" not in [option.action for option in decision.options]


def test_a_smaller_dtype_needs_less_of_it() -> None:
    one = weighed(thrown_out(dtype="k4v4"))
    # 4.25 bits an element instead of 16.
    assert "with cpuMemoryGiB 29" in one.message


@pytest.mark.parametrize("model", [None, replace(LLAMA, mla=True)])
def test_no_size_is_told_of_a_model_that_is_not_known_well_enough(model: ModelFacts | None) -> None:
    message = weighed(replace(thrown_out(), model=model)).message
    assert "cpuMemoryGiB" not in message
    assert "as much host memory as the caches of its GPUs take" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (OFFLOADED, "12% of the prompts' tokens come from 64 GiB of host memory, and prefixes are thrown out"),
        ({"engine": {"extraArgs": ["--kv_offloading_size", "8"]}}, "12% of the prompts' tokens come from host memory"),
    ],
)
def test_where_there_is_some_already_it_is_not_enough(changes: dict[str, Any], words: str) -> None:
    asked = {**changes, "engine": {"image": "kvpilot/runtime:1", **changes.get("engine", {})}}
    one = weighed(thrown_out(spec=spec(**asked)))
    assert one.outcome == "Insufficient"
    assert words in one.message


@pytest.mark.parametrize(
    ("changes", "dtype", "model", "outcome"),
    [
        ({}, "k4v4", replace(LLAMA, window_layers=16), "Vetoed"),
        ({}, "auto", replace(LLAMA, window_layers=16), "NotOwner"),
        ({"engine": {"image": "kvpilot/runtime:1", "extraArgs": ["--data-parallel-size=2"]}}, "auto", LLAMA, "Vetoed"),
        (
            {
                "kvCache": {
                    "mode": "Auto",
                    "retention": {"policy": "SinksAndWindow", "sinkTokens": 4, "windowTokens": 64},
                }
            },
            "auto",
            LLAMA,
            "Vetoed",
        ),
        ({"kvCache": {"mode": "Auto", "retention": {"policy": "All"}}}, "auto", LLAMA, "NotOwner"),
    ],
)
def test_where_it_would_be_refused_it_is_ruled_out(
    changes: dict[str, Any], dtype: str, model: ModelFacts, outcome: str
) -> None:
    assert weighed(replace(thrown_out(dtype=dtype, spec=spec(**changes)), model=model)).outcome == outcome


def test_what_a_hosts_memory_costs_is_not_known_and_not_told() -> None:
    decision = choose_step(thrown_out(gpu_hour_micros=2_000_000))
    (costs,) = (part for part in decision.message.split("; ") if part.startswith("an hour costs"))
    assert costs.count("auto at 1") == 1


def service(gpu: float, host: float = 0.0, before: float = 0.9, disk: float = 0.0, **sections: Any) -> Snapshot:
    """Return a full replica with a queue and the hit rates `gpu`, `host` and `disk`; `before` is the earlier one."""
    known = [replace(KNOWN, prefix_queries=QUERIED, prefix_hits=before * QUERIED)] * 90
    late = replace(KNOWN, prefix_queries=QUERIED, prefix_hits=gpu * QUERIED, host_hits=host * QUERIED)
    late = replace(late, disk_hits=disk * QUERIED)
    seen = samples(usage=0.97, waiting=20, seconds=900)
    flows = [*known, *[late] * (len(seen) - len(known))]
    s = running(manifest(**sections), "auto")
    return replace(s, samples={s.traffic: tuple(replace(a, flows=b) for a, b in zip(seen, flows, strict=True))})


def test_the_journal_has_it_with_its_reason() -> None:
    decision = decide(service(0.1, kvCache={"mode": "Auto", "ladder": ["fp8"]}))
    (one,) = (o for entry in decision.status.decisions for o in entry.options if o.action == "Offload")
    assert one.outcome == "NotOwner"
    assert status_faults(json.loads(json.dumps(decision.status.as_written()))) == ()
    assert parse_status(decision.status.as_written()).decisions == decision.status.decisions


def shown(s: Snapshot) -> dict[str, float]:
    """Return the metric's value for each tier."""
    return {
        tier: value
        for family, (tier, *_), value in (row for row in rows(s, decide(s)) if row[0] == "kvpilot_prefix_hit_ratio")
    }


def test_hits_by_tier_stand_in_the_metrics_of_a_service_with_two() -> None:
    assert shown(service(0.3, 0.45, **OFFLOADED)) == pytest.approx({"gpu": 0.3, "host": 0.45})


def test_what_a_disk_gave_is_told_apart_from_what_host_memory_gave() -> None:
    below = {"kvCache": {"mode": "Auto", "offload": {"cpuMemoryGiB": 64, "disk": {"sizeGiB": 500}}}}
    found = shown(service(0.3, 0.45, disk=0.2, **below))
    assert found == pytest.approx({"gpu": 0.3, "host": 0.25, "disk": 0.2})
    assert shown(service(0.3, 1e300, disk=1e301, **below))["host"] == 0


def test_a_service_with_one_tier_is_told_of_none() -> None:
    assert shown(service(0.3)) == {}


def test_no_hits_are_told_while_nothing_is_looked_up() -> None:
    s = service(0.3, 0.45, **OFFLOADED)
    assert shown(replace(s, samples={s.traffic: samples(usage=0.1, waiting=0)})) == {}


def test_whatever_engines_say_of_hits_it_is_a_share() -> None:
    assert shown(service(1e12, 1e300, **OFFLOADED)) == {"gpu": 1, "host": 1}
