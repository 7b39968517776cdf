import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_cli.plan import models
from kvpilot_cli.plan.capacity import cache, memory, weight_bytes
from kvpilot_cli.plan.gpus import find_gpu
from kvpilot_cli.plan.load import FILL, Load, cost, most_sequences, operate
from kvpilot_cli.plan.speed import Speed, attention_efficiency
from kvpilot_formats.formats import FORMATS, own_names

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
RUNS = [run for run in json.loads((BENCHMARKS / "h200-engine.json").read_text()) if run["shape"] == "llama3-8b"]

loads = st.builds(
    Load,
    requests_per_second=st.floats(0.01, 500),
    prompt_tokens=st.integers(1, 30_000),
    generated_tokens=st.integers(1, 4_000),
    token_seconds=st.floats(0.015, 0.2),
)
dtypes = st.sampled_from(["auto", "fp8", "int8", "k4v4", "k4v2"])


def engine(dtype="auto", model="Llama-3-8B", gpu="H200", gpus=1):
    m, g = models.find(model), find_gpu(gpu)
    weights = weight_bytes(m, m.published)
    speed = Speed(m, g, gpus, cache(m, dtype, gpus), weights, attention_efficiency(m, dtype), attention_efficiency(m, "auto"))  # fmt: skip  # noqa: E501
    return speed, memory(g, gpus, 0.9, weights).kv_bytes


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["dtype"])
def test_decode_steps_are_within_eight_percent_of_those_measured_on_an_h200(run):
    speed, _ = engine(run["dtype"])
    assert len(run["cases"]) >= 7
    for case in run["cases"].values():
        # The run decodes 128 tokens, so a step's mean context is 64 tokens longer than the prompt.
        step = 1000 * speed.step_seconds(case["batch"], case["context"] + 64)
        assert step == pytest.approx(case["step_ms"], rel=0.08)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["dtype"])
def test_prompts_take_within_eight_percent_of_the_time_measured_on_an_h200(run):
    speed, _ = engine(run["dtype"])
    for name in ("32x16384", "1x65536"):
        case = run["cases"][name]
        rate = case["context"] / speed.prompt_seconds(case["context"])
        assert rate == pytest.approx(case["prefill"]["tokens_per_s"], rel=0.08)


def test_efficiencies_at_head_dim_256_are_those_of_the_benchmark():
    raw = json.loads((BENCHMARKS / "h200-decode.json").read_text())
    names = {"FlashAttention 3 bf16": "auto", "FlashAttention 3 fp8": "fp8"}
    found = {}
    for row in raw["rows"]:
        case = row["case"]
        if (case["dim"], case["batch"], case["context"]) == (256, 32, 16384):
            microseconds = row.get("layer") or row["merged"]
            found[names.get(row["name"], row["name"])] = row["bytes"] / (microseconds * 1e-6) / 4.8e12
    measured = found.keys() & FORMATS.keys()
    assert {"auto", "fp8", *own_names()} <= measured
    for dtype in measured:
        assert FORMATS[dtype].read_share(256) == pytest.approx(found[dtype], abs=0.001)


@settings(deadline=None)
@given(loads, dtypes)
def test_the_planned_replicas_carry_the_load_and_one_less_does_not(load, dtype):
    speed, kv = engine(dtype)
    found = cost(speed, kv, load)
    if found.replicas is None:
        return
    at = operate(speed, kv, load, load.requests_per_second / found.replicas)
    assert at == found.operating
    assert at.binds is None
    assert at.token_seconds <= load.token_seconds
    assert at.fill <= FILL
    assert at.sequences <= most_sequences(speed.gpu)
    if found.replicas == 1:
        assert found.limit is None
    else:
        fewer = operate(speed, kv, load, load.requests_per_second / (found.replicas - 1))
        assert fewer.binds == found.limit is not None


@settings(deadline=None)
@given(loads, dtypes)
def test_the_number_of_running_sequences_obeys_littles_law(load, dtype):
    speed, kv = engine(dtype)
    found = cost(speed, kv, load)
    if found.replicas is None:
        return
    at, rate = found.operating, load.requests_per_second / found.replicas
    decoding = at.sequences - at.prompt_share
    assert decoding == pytest.approx(rate * load.generated_tokens * at.token_seconds, rel=1e-4, abs=1e-4)
    context = load.prompt_tokens + load.generated_tokens / 2
    step = speed.step_seconds(max(1.0, decoding), context)
    assert at.token_seconds * (1 - at.prompt_share) == pytest.approx(step, rel=1e-4)


@settings(deadline=None)
@given(loads, dtypes, st.floats(1.0, 10.0))
def test_more_requests_or_less_patience_never_need_fewer_replicas(load, dtype, more):
    speed, kv = engine(dtype)
    base = cost(speed, kv, load).replicas
    busier = Load(load.requests_per_second * more, load.prompt_tokens, load.generated_tokens, load.token_seconds)
    hastier = Load(load.requests_per_second, load.prompt_tokens, load.generated_tokens, load.token_seconds / more)
    for harder in (busier, hastier):
        needed = cost(speed, kv, harder).replicas
        if base is None:
            assert needed is None
        else:
            assert needed is None or needed >= base


def test_a_memory_bound_load_needs_fewer_gpus_with_fewer_bits():
    load = Load(20, 12_000, 1_000, 0.2)
    replicas = {d: cost(*engine(d, gpu="L40S"), load).replicas for d in ("auto", "fp8", "k4v4")}
    assert cost(*engine("auto", gpu="L40S"), load).limit == "KV memory"
    assert replicas["k4v4"] < replicas["fp8"] < replicas["auto"]


def test_a_load_of_long_prompts_and_short_answers_needs_as_many_gpus_in_every_dtype():
    load = Load(10, 16_000, 20, 0.5)
    assert len({cost(*engine(d), load).replicas for d in ("auto", "fp8", "k8v4", "k4v4", "k4v2")}) == 1


def test_a_load_of_short_requests_is_limited_by_max_num_seqs():
    speed, kv = engine(model="Qwen2.5-0.5B-Instruct", gpu="L4")
    found = cost(speed, kv, Load(1000, 10, 1_000, 0.2))
    assert found.limit == "sequences"
    assert 200 < found.operating.sequences <= most_sequences(speed.gpu) == 256


def test_past_its_window_a_sequence_slows_a_step_only_by_the_full_layers():
    speed, _ = engine(model="gemma-3-27b-it")
    slower = speed.step_seconds(1, 8192) - speed.step_seconds(1, 4096)
    full = 4096 * 10 * 16 * 2 * 128 * 2  # tokens, layers, KV heads, keys and values, head_dim, bytes
    assert slower == pytest.approx(full / (4.8e12 * speed.efficiency), rel=1e-6)


def test_a_latency_target_below_one_step_cannot_be_reached():
    found = cost(*engine(), Load(1, 1_000, 100, 0.001))
    assert (found.replicas, found.limit) == (None, "time per token")


def test_a_request_longer_than_the_cache_cannot_be_served():
    found = cost(*engine(), Load(1, 900_000, 100, 10.0))
    assert (found.replicas, found.limit) == (None, "KV memory")


def test_a_mixture_of_experts_reads_more_experts_with_more_sequences():
    speed, _ = engine(model="Qwen3-30B-A3B")
    one, many = speed.step_seconds(1, 16), speed.step_seconds(256, 16)
    dense, _ = engine(model="Qwen3-32B")
    assert one < dense.step_seconds(1, 16) / 5
    assert many > 5 * one
    assert many < dense.step_seconds(256, 16)
