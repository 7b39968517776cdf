"""The forecast of how a step of the pilot changes the time between two tokens."""

from dataclasses import replace
from datetime import timedelta

import pytest

from kvpilot_operator.decide.load.workload import Workload
from kvpilot_operator.decide.steps.latency import expected_itl_change
from kvpilot_operator.decide.steps.policy_input import PolicyInput
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts
from kvpilot_operator.state.status import Experience
from support.services import NOW, manifest, spec_of

LLAMA = ModelFacts(head_dim=128, kv_heads=8, layers=32, window_layers=0, mla=False)
SPEC = spec_of(manifest())
# docs/benchmarks/h200-engine.md: 32 sequences of 16,384 tokens in a cache of 889,584, a step of 20.50 ms with `auto`.
FULL = Workload("MemoryBound", usage_percent=59, pods=1, capacity_tokens=889_584, itl_seconds=0.0205)


def expected(to="k4v4", workload=FULL, load=1.0, **changes):
    now = PolicyInput(NOW, SPEC, workload, "auto", 1, 1, NodeFacts("NVIDIA-H200", (9, 0)), model=LLAMA)
    return expected_itl_change(replace(now, **changes), to, load)


@pytest.mark.parametrize(("dtype", "step_ms"), [("fp8", 16.63), ("k4v4", 10.19), ("k4v2", 10.03)])
def test_the_forecast_equals_measured_step_times_of_an_h200(dtype, step_ms):
    measured = 100 * (step_ms / 20.50 - 1)
    assert expected(dtype).percent == pytest.approx(measured, abs=3)


@pytest.mark.parametrize("dtype", ["int8_per_token_head", "int4_per_token_head"])
def test_vllms_own_integer_caches_are_forecast_to_be_slower(dtype):
    assert (expected(dtype).percent or 0) > 100


def test_heads_above_128_are_forecast_by_measurements_at_256_if_there_are_any():
    wide = replace(LLAMA, head_dim=256, kv_heads=4)
    small, large = (expected("k4v4", model=model).percent for model in (LLAMA, wide))
    # At head_dim 256, k4v4 is read at 0.72 times the bytes per second of 16 bits, and at 128 at 0.84 times.
    assert (small, large) == (pytest.approx(-53, abs=2), pytest.approx(-49, abs=2))
    assert (expected("int4_per_token_head", model=wide).percent or 0) > 100


def test_a_canarys_measurement_replaces_the_forecast():
    seen = Experience(
        revision="r",
        dtype="k4v4", from_dtype="auto", model="hf://Qwen/Qwen3-8B", image="kvpilot/runtime:1", gpu="NVIDIA-H200",
        time=NOW, verdict="Passed", reason="CanaryPassed", itl_p95_change_percent=-12,
    )  # fmt: skip
    older = replace_time(seen, -3)
    assert expected(history=(seen, older)).percent == -12
    assert expected("fp8", history=(seen,)).percent != -12


def replace_time(seen, days):
    return Experience(
        **{name: getattr(seen, name) for name in seen.__struct_fields__}
        | {"time": NOW + timedelta(days=days), "itl_p95_change_percent": 40},
    )


def test_a_canary_without_a_verdict_does_not_count_for_the_forecast():
    """A canary without a verdict has crashed, or no latency difference was significant before its deadline."""
    for verdict in ("Error", "Inconclusive"):
        assert expected(history=(trial(verdict, 0, 300),)).percent == expected().percent, verdict
        assert expected(history=(trial(verdict, 0, 300), trial("Passed", -3, -12))).percent == -12


def test_a_failed_canary_counts_while_its_dtype_is_denied():
    assert SPEC.rollout.deny_seconds == 7 * 86_400
    assert expected(history=(trial("Failed", -6, 25),)).percent == 25
    assert expected(history=(trial("Failed", -7, 25),)).percent == expected().percent
    lifted = spec_of(manifest(rollout={"denySeconds": 0}))
    assert expected(spec=lifted, history=(trial("Failed", 0, 25),)).percent == expected().percent


def trial(verdict, days, percent):
    return Experience(
        revision="r",
        dtype="k4v4", from_dtype="auto", model="hf://Qwen/Qwen3-8B", image="kvpilot/runtime:1", gpu="NVIDIA-H200",
        time=NOW + timedelta(days=days), verdict=verdict, reason="why", itl_p95_change_percent=percent,
    )  # fmt: skip


def test_verdicts_on_canaries_with_another_model_or_gpu_do_not_count():
    seen = Experience(
        revision="r",
        dtype="k4v4", from_dtype="auto", model="hf://another/model", image="kvpilot/runtime:1", gpu="NVIDIA-H200",
        time=NOW, verdict="Passed", reason="CanaryPassed", itl_p95_change_percent=-12,
    )  # fmt: skip
    assert expected(history=(seen,)).percent != -12


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"node": NodeFacts()}, "bandwidth of cpu"),
        ({"node": NodeFacts("NVIDIA-H200-SHARED")}, "bandwidth of NVIDIA-H200-SHARED"),
        ({"model": None}, "architecture"),
        ({"model": replace(LLAMA, mla=True)}, "latent attention"),
        ({"to": "nvfp4"}, "nvfp4 was never measured"),
        ({"workload": replace(FULL, itl_seconds=None)}, "no token was generated"),
    ],
)
def test_if_a_fact_for_the_forecast_is_unknown_the_message_names_it(changes, why):
    found = expected(**changes)
    assert found.percent is None
    assert why in found.message


def test_half_the_cached_tokens_halve_the_time_of_attention():
    half = expected("auto", load=0.5).percent
    assert half == pytest.approx(-37, abs=2)


def test_tensor_parallel_gpus_share_the_heads():
    parallel = spec_of(manifest(engine={"image": "i", "tensorParallelSize": 8}))
    alone, shared = expected("k4v4").percent, expected("k4v4", spec=parallel).percent
    assert alone is not None
    assert shared is not None
    assert alone < shared < 0
