"""Which step does the arbiter take, and which does it never take?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_kernels import formats
from kvpilot_operator.decide.judging.arbiter import Ruling, Situation, arbitrate
from kvpilot_operator.decide.judging.capacity import projected_tokens, smaller
from kvpilot_operator.decide.judging.ladder import denial
from kvpilot_operator.decide.judging.veto import veto
from kvpilot_operator.decide.judging.workload import Workload, classify
from kvpilot_operator.state.snapshot import Flows, ModelFacts, NodeFacts, Sample
from kvpilot_operator.state.status import Denied, Experience, Saturation
from support.services import NOW, manifest, spec_of

H200 = NodeFacts("NVIDIA-H200", (9, 0), 143_771)
A100 = NodeFacts("NVIDIA-A100-SXM4-80GB", (8, 0), 81_920)
LLAMA = ModelFacts(head_dim=128, kv_heads=8, layers=32, window_layers=0, mla=False)
DWELL = 21_600


def spec(**changes):
    return spec_of(
        manifest(
            **{"kvCache": {"mode": "Auto", "ladder": ["fp8", "k8v4", "k4v4"]}, "scaling": {"maxReplicas": 4}} | changes
        )
    )


def workload(kind="MemoryBound", *, demand=1000, capacity=1000, pods=1, **changes):
    base = Workload(
        kind, "evidence", usage_percent=97, waiting=4.0, running=8.0, pods=pods, capacity_tokens=capacity * pods,
        demand_tokens=demand,
    )  # fmt: skip
    return replace(base, **changes)


def situation(w: Workload | None = None, **changes):
    w = w or workload()
    base = Situation(NOW, spec(), w, "auto", w.pods, w.pods, H200)
    return replace(base, **changes)


def calm(*, load=0.1, pods=2, kind="Relaxed", rate=None, **changes):
    base = workload(
        kind, demand=int(1000 * load), pods=pods, usage_percent=round(100 * load / pods), waiting=0.0, calm=True,
        peak_load=load, requests_per_second=rate, mean_prompt=100.0, mean_generation=100.0,
    )  # fmt: skip
    return replace(base, **changes)


def denied(dtype, reason="AccuracyRegressed", **changes):
    fields = {"dtype": dtype, "model": "hf://Qwen/Qwen3-8B", "image": "kvpilot/runtime:1", "gpu": "NVIDIA-H200"}
    return Denied(**fields | changes, reason=reason, message="why", until=NOW + timedelta(hours=1))


def step(ruling: Ruling) -> tuple[str, str, int]:
    return ruling.chosen.action, ruling.chosen.dtype, ruling.chosen.replicas


def outcomes(ruling: Ruling) -> dict[str, str]:
    return {o.dtype if o.action.startswith("Dtype") else o.action: o.outcome for o in ruling.options}


def test_the_safest_dtype_that_holds_the_demand_is_taken_before_a_gpu():
    ruling = arbitrate(situation(workload(demand=1500)))
    assert step(ruling) == ("DtypeDown", "fp8", 1)
    assert ruling.chosen.usage_percent == 75
    assert outcomes(ruling) == {
        "fp8": "Chosen",
        "k8v4": "Possible",
        "k4v4": "Possible",
        "ScaleOut": "Possible",
        "Stay": "Passed",
    }


def test_more_demand_takes_a_smaller_dtype():
    assert step(arbitrate(situation(workload(demand=2000))))[1] == "k8v4"
    assert step(arbitrate(situation(workload(demand=3000))))[1] == "k4v4"


def test_demand_that_no_dtype_holds_alone_takes_as_many_replicas_as_it_needs_at_most_twice_as_many():
    ruling = arbitrate(situation(workload(demand=8000, pods=2, capacity=1000)))
    assert step(ruling) == ("ScaleOut", "auto", 4)
    assert ruling.chosen.gpus == 2
    assert outcomes(ruling)["k4v4"] == "Insufficient"


def test_a_replica_costs_all_the_gpus_that_its_tensor_parallelism_takes():
    s = situation(workload(demand=9000), spec=spec(engine={"image": "i", "tensorParallelSize": 4}))
    assert arbitrate(s).chosen.gpus == 4


def test_a_dtype_that_is_not_enough_alone_is_taken_where_replicas_cannot_grow():
    s = situation(workload(demand=9000), spec=spec(scaling={"maxReplicas": 1}))
    assert step(arbitrate(s)) == ("DtypeDown", "k4v4", 1)


def test_a_replica_is_added_while_the_dwell_holds_the_dtype():
    s = situation(workload(demand=1500), dtype_changed=NOW - timedelta(seconds=DWELL - 1))
    ruling = arbitrate(s)
    assert step(ruling) == ("ScaleOut", "auto", 2)
    assert outcomes(ruling)["fp8"] == "Dwelling"
    assert step(arbitrate(replace(s, now=NOW + timedelta(seconds=2))))[0] == "DtypeDown"


def test_after_a_rollback_the_next_dtype_waits():
    s = situation(workload(demand=1500), rolled_back=NOW - timedelta(minutes=59))
    assert outcomes(arbitrate(s))["fp8"] == "CoolingDown"
    assert step(arbitrate(replace(s, now=NOW + timedelta(minutes=2))))[0] == "DtypeDown"


def test_a_held_step_says_what_it_would_be_and_when():
    s = situation(workload(demand=1500), dtype_changed=NOW, spec=spec(scaling={"maxReplicas": 1}))
    ruling = arbitrate(s)
    assert step(ruling) == ("Stay", "auto", 1)
    assert ruling.reason == "Dwelling"
    assert "the next may come at 2026-11-21T18:00:00Z" in (ruling.hold or "")
    assert ruling.wanted is not None
    assert ruling.wanted.dtype == "fp8"


def test_a_denied_dtype_is_passed_over_for_this_model_image_and_gpu_only():
    s = situation(workload(demand=1500))
    assert step(arbitrate(replace(s, denied=(denied("fp8"),))))[1] == "k8v4"
    assert step(arbitrate(replace(s, denied=(denied("fp8", gpu="NVIDIA-L4"),))))[1] == "fp8"


def test_a_dtype_that_the_gpu_cannot_compute_is_passed_over():
    ruling = arbitrate(situation(workload(demand=1500), node=A100))
    assert step(ruling)[1] == "k8v4"
    assert outcomes(ruling)["fp8"] == "Vetoed"


def test_at_the_end_of_the_ladder_it_scales_out():
    assert step(arbitrate(situation(workload(demand=1500), dtype="k4v4"))) == ("ScaleOut", "k4v4", 2)


def test_with_nothing_left_it_says_so():
    s = situation(workload(demand=1500), dtype="k4v4", spec=spec(scaling={"maxReplicas": 1}))
    assert arbitrate(s).reason == "EndOfLadder"


def test_replicas_that_still_load_are_waited_for():
    s = situation(workload(demand=9000), replicas=2, ready=1, replicas_changed=NOW - timedelta(minutes=5))
    assert step(arbitrate(s)) == ("Stay", "auto", 2)


def test_replicas_that_never_came_up_do_not_stand_in_the_way_of_a_dtype_and_are_not_asked_for_again():
    s = situation(workload(demand=1500), replicas=2, ready=1, replicas_changed=NOW - timedelta(hours=2))
    ruling = arbitrate(s)
    assert step(ruling) == ("DtypeDown", "fp8", 2)
    assert outcomes(ruling)["ScaleOut"] == "ReplicasMissing"


def test_replicas_that_belong_to_an_autoscaler_are_never_written():
    s = situation(workload(demand=9000), spec=spec(scaling={"mode": "External"}))
    assert outcomes(arbitrate(s))["ScaleOut"] == "NotOwner"
    assert arbitrate(s).chosen.action == "DtypeDown"


def test_prompts_or_the_batch_get_a_replica_and_never_a_dtype():
    for kind in ("PrefillBound", "ComputeBound"):
        ruling = arbitrate(situation(workload(kind)))
        assert step(ruling) == ("ScaleOut", "auto", 2)
        assert {outcomes(ruling)[d] for d in ("fp8", "k8v4", "k4v4")} == {"NotMemory"}


def test_a_fixed_dtype_is_never_stepped_but_replicas_are():
    fixed = spec_of(manifest(kvCache={"mode": "Fixed", "dtype": "fp8"}))
    ruling = arbitrate(situation(workload(demand=1500), dtype="fp8", spec=fixed))
    assert step(ruling) == ("ScaleOut", "fp8", 2)
    assert not any(o.action.startswith("Dtype") for o in ruling.options)


def test_metrics_that_say_too_little_move_nothing():
    for kind in ("NoMetrics", "Warming"):
        assert step(arbitrate(situation(workload(kind)))) == ("Stay", "auto", 1)


def test_nothing_begins_while_a_canary_is_in_flight():
    assert arbitrate(situation(workload(demand=1500), busy="fp8 is on trial")).reason == "Busy"


def experience(**found):
    return Experience(
        dtype="fp8", from_dtype="auto", model="hf://Qwen/Qwen3-8B", image="kvpilot/runtime:1", gpu="NVIDIA-H200",
        time=NOW, verdict="Passed", reason="CanaryPassed", **found,
    )  # fmt: skip


def test_a_step_that_a_canary_found_too_slow_is_not_tried_again():
    ruling = arbitrate(situation(workload(demand=1500), history=(experience(itl_p95_change_percent=25),)))
    assert outcomes(ruling)["fp8"] == "Slower"
    assert step(ruling)[1] == "k8v4"


def test_the_capacity_that_a_canary_measured_counts_more_than_bits():
    ruling = arbitrate(situation(workload(demand=1500), history=(experience(capacity_percent=120),)))
    assert step(ruling)[1] == "k8v4"


def test_when_pressure_leaves_a_replica_goes_first():
    s = situation(calm(load=0.2), dtype="k4v4", dtype_changed=NOW - timedelta(days=9))
    assert step(arbitrate(s)) == ("ScaleIn", "k4v4", 1)


def test_the_ladder_is_climbed_once_no_replica_can_go():
    s = situation(calm(load=0.1, pods=1), dtype="k4v4", dtype_changed=NOW - timedelta(days=9))
    ruling = arbitrate(s)
    assert step(ruling) == ("DtypeUp", "auto", 1)
    assert ruling.chosen.usage_percent == 38


def test_the_ladder_is_climbed_only_as_far_as_the_peak_fits_below_the_low_limit():
    s = situation(calm(load=0.2, pods=1), dtype="k4v4", dtype_changed=NOW - timedelta(days=9))
    assert step(arbitrate(s)) == ("DtypeUp", "fp8", 1)


def test_the_ladder_is_not_climbed_before_four_dwells():
    s = situation(calm(load=0.1, pods=1), dtype="k4v4", dtype_changed=NOW - timedelta(seconds=4 * DWELL - 1))
    assert step(arbitrate(s))[0] == "Stay"


def test_a_replica_stays_where_the_peak_would_be_too_much_for_the_others():
    assert step(arbitrate(situation(calm(load=0.7))))[0] == "Stay"


def test_a_replica_stays_where_the_others_would_get_the_requests_that_queued_before():
    learned = (Saturation(dtype="auto", requests_per_hour=3600, mean_prompt=100, mean_generation=100),)
    s = situation(calm(load=0.1, rate=0.45), saturations=learned)
    assert step(arbitrate(s))[0] == "Stay"
    assert step(arbitrate(replace(s, workload=calm(load=0.1, rate=0.3))))[0] == "ScaleIn"


def test_a_replica_stays_where_the_others_would_have_too_many_prompts_in_hand():
    assert step(arbitrate(situation(calm(load=0.1, prompts_in_hand=0.35))))[0] == "Stay"
    assert step(arbitrate(situation(calm(load=0.1, prompts_in_hand=0.25))))[0] == "ScaleIn"


def test_a_calm_replica_that_does_more_than_it_could_refutes_what_was_learned():
    learned = (Saturation(dtype="auto", requests_per_hour=3600, mean_prompt=100, mean_generation=100),)
    assert step(arbitrate(situation(calm(load=0.1, rate=1.1), saturations=learned)))[0] == "ScaleIn"


def test_what_a_replica_could_do_counts_for_similar_requests_only():
    learned = (Saturation(dtype="auto", requests_per_hour=3600, mean_prompt=4000, mean_generation=100),)
    assert step(arbitrate(situation(calm(load=0.1, rate=0.45), saturations=learned)))[0] == "ScaleIn"


def test_a_step_under_pressure_remembers_what_a_replica_could_do():
    w = workload(demand=1500, requests_per_second=2.0, mean_prompt=300.0, mean_generation=100.0)
    assert arbitrate(situation(w)).saturations == (
        Saturation(dtype="auto", requests_per_hour=7200, mean_prompt=300, mean_generation=100),
    )


def test_an_idle_service_keeps_its_last_replica():
    s = situation(calm(load=0.0, pods=1, kind="Idle"), spec=spec(scaling={"minReplicas": 0}))
    assert step(arbitrate(s))[0] == "Stay"


def test_a_climb_that_would_be_too_slow_is_left_out():
    w = calm(load=0.1, pods=1, itl_seconds=0.01, usage_percent=10)
    w = replace(w, capacity_tokens=3_346_368)
    s = situation(w, dtype="k4v4", dtype_changed=NOW - timedelta(days=9), model=LLAMA)
    assert step(arbitrate(s))[0] == "Stay"
    patient = spec(canary={"maxITLP95RegressionPercent": 1000})
    assert step(arbitrate(replace(s, spec=patient)))[0] == "DtypeUp"


LADDERS = st.lists(st.sampled_from(formats.names()[3:]), min_size=1, max_size=6, unique=True).map(
    lambda dtypes: _descending(dtypes)
)


def _descending(dtypes):
    kept: list[str] = []
    for dtype in sorted(dtypes, key=lambda d: -formats.parse(d).bits_per_element()):
        if not kept or smaller(dtype, kept[-1]):
            kept.append(dtype)
    return kept


TIMES = st.one_of(st.none(), st.integers(-200_000, 0).map(lambda s: NOW + timedelta(seconds=s)))
WORKLOADS = st.builds(
    Workload,
    st.sampled_from(["NoMetrics", "Warming", "Idle", "MemoryBound", "PrefillBound", "ComputeBound", "Relaxed"]),
    st.just("evidence"),
    usage_percent=st.integers(0, 100),
    waiting=st.floats(0, 1e6),
    running=st.floats(0, 1e6),
    pods=st.integers(0, 20),
    capacity_tokens=st.integers(0, 10**9),
    demand_tokens=st.integers(0, 10**12),
    requests_per_second=st.none() | st.floats(0, 1e6),
    mean_prompt=st.none() | st.floats(0, 1e6),
    mean_generation=st.none() | st.floats(0, 1e6),
    itl_seconds=st.none() | st.floats(0, 10),
    prompts_in_hand=st.none() | st.floats(0, 100),
    calm=st.booleans(),
    peak_load=st.floats(0, 20),
)
MODELS = st.none() | st.builds(
    ModelFacts, st.sampled_from([0, 64, 80, 96, 128, 256]), st.integers(0, 16), st.integers(0, 100),
    st.integers(0, 100), st.booleans(),
)  # fmt: skip
NODES = st.sampled_from([H200, A100, NodeFacts(), NodeFacts("unlabelled-gpu"), NodeFacts("Tesla-T4", (7, 5))])


@st.composite
def situations(draw, kinds=WORKLOADS):
    ladder = draw(LADDERS)
    least = draw(st.integers(0, 3))
    given = {
        "kvCache": {
            "mode": draw(st.sampled_from(["Auto", "Recommend"])), "ladder": ladder,
            "minDwellSeconds": draw(st.integers(0, 100_000)),
        },
        "scaling": {
            "mode": draw(st.sampled_from(["Operator", "External"])), "minReplicas": least,
            "maxReplicas": draw(st.integers(max(1, least), 10)),
        },
        "engine": {"image": "kvpilot/runtime:1", "tensorParallelSize": draw(st.integers(1, 8))},
    }  # fmt: skip
    node = draw(NODES)
    dtypes = ["auto", *ladder]
    return Situation(
        NOW, spec_of(manifest(**given)), draw(kinds), draw(st.sampled_from([*dtypes, "k4v4", "fp8"])),
        draw(st.integers(0, 10)), draw(st.integers(0, 10)), node, draw(MODELS),
        denied=tuple(denied(d, gpu=node.gpu) for d in draw(st.lists(st.sampled_from(dtypes), max_size=3, unique=True))),
        saturations=tuple(
            Saturation(dtype=d, requests_per_hour=draw(st.integers(0, 10**6)), mean_prompt=100, mean_generation=100)
            for d in draw(st.lists(st.sampled_from(dtypes), max_size=2, unique=True))
        ),
        dtype_changed=draw(TIMES), replicas_changed=draw(TIMES), rolled_back=draw(TIMES),
        busy=draw(st.sampled_from([None, None, "busy"])), no_canary=draw(st.sampled_from([None, None, "paused"])),
    )  # fmt: skip


@given(situations())
@settings(max_examples=200)
def test_every_situation_has_a_ruling_with_its_reason(s):
    ruling = arbitrate(s)
    assert ruling.reason
    assert ruling.message
    assert all(o.message for o in ruling.options)
    assert ruling.chosen.outcome == "Chosen"
    assert sum(o.outcome == "Chosen" for o in ruling.options) == 1
    assert (ruling.chosen.action == "Stay") == ((ruling.chosen.dtype, ruling.chosen.replicas) == (s.dtype, s.replicas))


@given(situations())
@settings(max_examples=200)
def test_a_denied_or_vetoed_dtype_is_never_chosen(s):
    chosen = arbitrate(s).chosen
    if chosen.action.startswith("Dtype"):
        assert denial(chosen.dtype, s.spec, s.node, s.denied, s.now) is None
        assert veto(chosen.dtype, s.spec, s.node, s.model) is None


@given(situations())
@settings(max_examples=200)
def test_no_dtype_changes_inside_the_dwell_while_paused_or_beside_another_step(s):
    if arbitrate(s).chosen.action.startswith("Dtype"):
        assert s.busy is None
        assert s.no_canary is None
        assert not s.loading
        dwell = timedelta(seconds=s.spec.kv_cache.min_dwell_seconds)
        assert s.dtype_changed is None or s.now >= s.dtype_changed + dwell


@given(situations())
@settings(max_examples=200)
def test_replicas_are_only_ever_chosen_by_their_owner_and_within_the_limits(s):
    chosen, scaling = arbitrate(s).chosen, s.spec.scaling
    if chosen.action == "ScaleOut":
        assert scaling.mode == "Operator"
        assert s.replicas < chosen.replicas <= scaling.max_replicas
        assert s.ready >= s.replicas
    if chosen.action == "ScaleIn":
        assert scaling.mode == "Operator"
        assert chosen.replicas == s.replicas - 1
        assert chosen.replicas >= max(1, scaling.min_replicas)


@given(situations())
@settings(max_examples=200)
def test_a_smaller_dtype_is_for_memory_alone_and_less_of_anything_for_calm_alone(s):
    chosen, w = arbitrate(s).chosen, s.workload
    if chosen.action == "DtypeDown":
        assert w.kind == "MemoryBound"
        assert smaller(chosen.dtype, s.dtype)
    if chosen.action in ("ScaleIn", "DtypeUp"):
        assert w.calm
        assert w.kind in ("Relaxed", "Idle")
    if chosen.action == "ScaleOut":
        assert w.kind in ("MemoryBound", "PrefillBound", "ComputeBound")


@given(situations(), st.floats(1, 50))
@settings(max_examples=200)
def test_more_demand_never_chooses_less_capacity(s, times):
    s = replace(s, workload=replace(s.workload, kind="MemoryBound"))
    more = replace(s, workload=replace(s.workload, demand_tokens=int(s.workload.demand_tokens * times)))
    before, after = arbitrate(s).chosen, arbitrate(more).chosen
    assert not smaller(before.dtype, after.dtype) or after.replicas > before.replicas


@dataclass
class Fluid:
    """A service under a constant load as a fluid: what its metrics settle at. Seconds and tokens."""

    rate: float
    prompt: float
    answer: float
    base: float
    per_token: float
    prefill: float
    """Seconds for a prompt token."""
    capacity: int
    """Tokens of a replica with dtype auto."""

    def sample(self, time, dtype, pods) -> Sample:
        capacity = projected_tokens(self.capacity, "auto", dtype)
        rate, each = self.rate / pods, self.prompt + self.answer / 2
        busy = min(rate * self.prompt * self.prefill, 0.999)
        # held = rate * residence * each, residence = answer * step, step = (base + per_token * held) / (1 - busy)
        flow = rate * self.answer * each / (1 - busy)
        held = flow * self.base / (1 - flow * self.per_token) if flow * self.per_token < 1 else float("inf")
        most = min(capacity, 1024 * each)
        waits = held > most or busy >= 0.999
        held = min(held, most)
        running = held / each
        step = (self.base + self.per_token * held) / (1 - busy)
        done = min(rate, running / (self.answer * step), 1 / (self.prompt * self.prefill)) * 5 * pods
        flows = Flows(
            seconds=5.0 * pods, prompt_tokens=done * self.prompt, generation_tokens=done * self.answer,
            finished=done, prefill_seconds=min(5.0 * pods, done * self.prompt * self.prefill),
            decode_seconds=done * self.answer * step,
        )  # fmt: skip
        waiting = rate * 60 * pods if waits else 0.0
        return Sample(time, pods, min(1.0, held / capacity), running * pods, waiting, capacity * pods, dtype, flows)

    def window(self, now, dtype, pods):
        return tuple(self.sample(now - timedelta(seconds=back), dtype, pods) for back in range(600, -1, -30))


FLUIDS = st.builds(
    Fluid, rate=st.floats(0.01, 60), prompt=st.floats(10, 30_000), answer=st.floats(2, 2000),
    base=st.floats(0.003, 0.1), per_token=st.floats(1e-9, 1e-6), prefill=st.floats(1e-5, 1e-3),
    capacity=st.integers(40_000, 2_000_000),
)  # fmt: skip


@given(FLUIDS, st.integers(1, 4), st.integers(4, 12), st.sampled_from(["auto", "fp8", "k4v4"]), st.booleans())
@settings(max_examples=60)
def test_a_constant_load_comes_to_rest_and_stays_there(load, least, most, dtype, known):
    limits = spec(scaling={"minReplicas": least, "maxReplicas": most})
    s = Situation(NOW, limits, Workload("NoMetrics"), dtype, least, least, H200, LLAMA if known else None)
    taken, bound, seen = [], False, {}
    for quarter in range(480):
        now = NOW + timedelta(minutes=15 * quarter)
        key = (s.dtype, s.replicas, bound)
        if key not in seen:
            window = load.window(now, s.dtype, s.replicas)
            seen[key] = classify(window, limits.kv_cache.pressure, now, was_bound=bound)
        bound = seen[key].kind == "MemoryBound"
        ruling = arbitrate(replace(s, now=now, workload=seen[key]))
        chosen = ruling.chosen
        if chosen.action != "Stay":
            taken.append((quarter, chosen.action, chosen.dtype, chosen.replicas))
        s = replace(
            s, dtype=chosen.dtype, replicas=chosen.replicas, ready=chosen.replicas, saturations=ruling.saturations,
            dtype_changed=now if chosen.dtype != s.dtype else s.dtype_changed,
            replicas_changed=now if chosen.replicas != s.replicas else s.replicas_changed,
        )  # fmt: skip
    assert not [t for t in taken if t[0] > 360], taken
    assert len([t for t in taken if t[1].startswith("Dtype")]) <= 4, taken
