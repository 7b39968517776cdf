"""Steps that the policy never takes in any situation."""

import math
from dataclasses import replace
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_formats import formats
from kvpilot_operator.api.scaling import Objective
from kvpilot_operator.api.words import ObjectiveState, WorkloadKind
from kvpilot_operator.decide.load.surge import Surge
from kvpilot_operator.decide.load.workload import Workload
from kvpilot_operator.decide.steps.capacity import smaller
from kvpilot_operator.decide.steps.ladder import denial, infeasible
from kvpilot_operator.decide.steps.policy import choose_step
from kvpilot_operator.decide.steps.policy_input import PolicyInput
from kvpilot_operator.state.decision import ObjectiveResult
from kvpilot_operator.state.snapshot import ModelFacts, NodeFacts
from kvpilot_operator.state.status import Saturation
from support.policy_inputs import A100, H200, denied
from support.services import NOW, manifest, spec_of

LADDERS = st.lists(st.sampled_from(tuple(formats.FORMATS)[3:]), min_size=1, max_size=6, unique=True).map(
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
    st.sampled_from(list(WorkloadKind)),
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
    best_requests_per_second=st.none() | st.floats(0, 1e6),
    memory=st.booleans(),
    surge=st.none() | st.builds(Surge, st.just("surge"), st.floats(0, 1e6), st.floats(0, 1e6)),
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
    return PolicyInput(
        NOW, spec_of(manifest(**given)), draw(kinds), draw(st.sampled_from([*dtypes, "k4v4", "fp8"])),
        draw(st.integers(0, 10)), draw(st.integers(0, 10)), node, draw(MODELS),
        denied=tuple(denied(d, gpu=node.gpu) for d in draw(st.lists(st.sampled_from(dtypes), max_size=3, unique=True))),
        saturations=tuple(
            Saturation(
                dtype=d, requests_per_hour=draw(st.integers(0, 10**6)), mean_prompt=100, mean_generation=100,
                computed_prompt=draw(st.none() | st.integers(0, 200)), memory=draw(st.booleans()),
            )
            for d in draw(st.lists(st.sampled_from(dtypes), max_size=2, unique=True))
        ),
        dtype_changed=draw(TIMES), replicas_changed=draw(TIMES), rolled_back=draw(TIMES),
        busy=draw(st.sampled_from([None, None, "busy"])), yields=draw(st.booleans()),
        no_canary=draw(st.sampled_from([None, None, "paused"])),
    )  # fmt: skip


@given(situations())
@settings(max_examples=200)
def test_every_input_gives_a_decision_with_a_reason(s):
    decision = choose_step(s)
    assert decision.reason
    assert decision.message
    assert all(o.message for o in decision.options)
    assert decision.chosen.outcome == "Chosen"
    assert sum(o.outcome == "Chosen" for o in decision.options) == 1
    chosen = decision.chosen
    assert (chosen.action == "Stay") == ((chosen.dtype, chosen.replicas) == (s.dtype, s.replicas))


@given(situations())
@settings(max_examples=200)
def test_a_denied_or_vetoed_dtype_is_never_chosen(s):
    chosen = choose_step(s).chosen
    if chosen.action.startswith("Dtype"):
        assert denial(chosen.dtype, s.spec, s.node.gpu, s.denied, s.now) is None
        assert infeasible(chosen.dtype, s.spec, s.node, s.model) is None


@given(situations())
@settings(max_examples=200)
def test_no_dtype_changes_during_a_dwell_a_pause_or_another_step(s):
    if choose_step(s).chosen.action.startswith("Dtype"):
        assert s.busy is None
        assert s.no_canary is None
        assert not s.loading
        dwell = timedelta(seconds=s.spec.kv_cache.min_dwell_seconds)
        assert s.dtype_changed is None or s.now >= s.dtype_changed + dwell


@given(situations())
@settings(max_examples=200)
def test_during_a_trial_only_a_surge_adds_replicas(s):
    s = replace(s, busy="busy")
    chosen = choose_step(s).chosen
    assert chosen.action == "Stay" or (chosen.action == "ScaleOut" and s.yields and s.workload.surge is not None)


@given(situations())
@settings(max_examples=200)
def test_the_pilot_changes_replicas_only_in_mode_operator_and_within_the_limits(s):
    chosen, scaling = choose_step(s).chosen, s.spec.scaling
    if chosen.action == "ScaleOut":
        assert scaling.mode == "Operator"
        assert s.replicas < chosen.replicas <= scaling.max_replicas
        assert s.ready >= s.replicas or (s.loading and s.workload.surge is not None)
        assert chosen.replicas <= max(2 * s.replicas, s.replicas + (4 if s.workload.surge else 1))
    if chosen.action == "ScaleIn":
        assert scaling.mode == "Operator"
        known = any(k.dtype == s.dtype and k.computed_prompt is not None for k in s.saturations)
        assert math.ceil(s.replicas / 2) <= chosen.replicas < s.replicas
        assert known or chosen.replicas == s.replicas - 1
        assert chosen.replicas >= max(1, scaling.min_replicas)


@given(situations())
@settings(max_examples=200)
def test_a_smaller_dtype_needs_memory_pressure_and_a_removal_needs_calm(s):
    chosen, w = choose_step(s).chosen, s.workload
    if chosen.action == "DtypeDown":
        known = next((k for k in s.saturations if k.dtype == s.dtype), None)
        assert w.kind == "MemoryBound" or (w.calm and known is not None and known.memory)
        assert smaller(chosen.dtype, s.dtype)
    if chosen.action in ("ScaleIn", "DtypeUp"):
        assert w.calm
        assert w.kind in ("Relaxed", "Idle")
    if chosen.action == "ScaleOut":
        assert w.kind in ("MemoryBound", "PrefillBound", "ComputeBound") or w.surge is not None


@given(situations(), st.floats(1, 50))
@settings(max_examples=200)
def test_a_larger_demand_never_leads_to_less_capacity(s, times):
    s = replace(s, workload=replace(s.workload, kind="MemoryBound"))
    more = replace(s, workload=replace(s.workload, demand_tokens=int(s.workload.demand_tokens * times)))
    before, after = choose_step(s).chosen, choose_step(more).chosen
    assert not smaller(before.dtype, after.dtype) or after.replicas > before.replicas


SEEN = st.none() | st.floats(0.001, 10)


def measured(limits: tuple[int, int], seen: tuple[float | None, float | None]) -> tuple[ObjectiveResult, ...]:
    """Return TTFT and ITL objectives that are held, missed or unknown."""
    found = []
    for metric, limit, seconds in zip(("TTFT", "ITL"), limits, seen, strict=True):
        state = "NoSamples" if seconds is None else "Held" if seconds <= limit / 1000 else "Missed"
        found.append(ObjectiveResult(Objective(metric, 95, limit), ObjectiveState(state), seconds))
    return tuple(found)


@given(situations())
@settings(max_examples=200)
def test_objectives_without_samples_decide_nothing(s):
    unknown = replace(s.workload, objectives=measured((500, 50), (None, None)))
    with_them, without = choose_step(replace(s, workload=unknown)), choose_step(s)
    # Objectives only add saturations, which later decisions read.
    assert replace(with_them, saturations=()) == replace(without, saturations=())


@given(situations(), st.tuples(SEEN, SEEN), st.integers(1, 9999), st.integers(1, 9999), st.floats(0.01, 1))
@settings(max_examples=400)
def test_a_tighter_objective_never_chooses_fewer_replicas(s, seen, first, between, tighter):
    def replicas(times):
        limits = max(1, int(first * times)), max(1, int(between * times))
        return choose_step(replace(s, workload=replace(s.workload, objectives=measured(limits, seen)))).chosen.replicas

    assert replicas(tighter) >= replicas(1.0)
