"""Under a constant load, the policy stops changing the service."""

from bisect import bisect_left
from dataclasses import dataclass, replace
from datetime import timedelta

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpilot_operator.decide.load.saturation import HOLD, backoff
from kvpilot_operator.decide.load.workload import Workload, classify
from kvpilot_operator.decide.steps.capacity import gain
from kvpilot_operator.decide.steps.policy import choose_step
from kvpilot_operator.decide.steps.policy_input import PolicyInput
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Flows, Sample
from support.policy_inputs import H200, LLAMA, spec
from support.services import NOW


@dataclass
class Fluid:
    """Fluid model of a service under a constant load: its metrics in equilibrium, in seconds and tokens."""

    rate: float
    prompt: float
    answer: float
    base: float
    per_token: float
    prefill: float
    """Seconds to prefill one token."""
    capacity: int
    """Capacity of a replica with dtype auto, in tokens."""

    def sample(self, time, dtype, pods) -> Sample:
        capacity = int(self.capacity * gain("auto", dtype))
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
            ttft=_all_at(self.prompt * self.prefill / (1 - busy) + 60 * waits, done),
            itl=_all_at(step, done * self.answer),
        )  # fmt: skip
        waiting = rate * 60 * pods if waits else 0.0
        return Sample(time, pods, min(1.0, held / capacity), running * pods, waiting, capacity * pods, dtype, flows)

    def window(self, now, dtype, pods):
        return tuple(self.sample(now - timedelta(seconds=back), dtype, pods) for back in range(600, -1, -30))


QUARTER, QUARTERS, CALM = timedelta(minutes=15), 480, 361
"""Decision period, number of decisions, and number of decisions after which the initial load is forgotten."""

BOUNDS = (*(0.001 * 1.5**i for i in range(32)),)


def _all_at(seconds: float, count: float) -> Histogram:
    counts = [0.0] * (len(BOUNDS) + 1)
    counts[bisect_left(BOUNDS, seconds)] = count
    return Histogram(BOUNDS, tuple(counts), seconds * count)


OBJECTIVES = st.lists(
    st.builds(
        dict, metric=st.sampled_from(["TTFT", "ITL"]), percentile=st.sampled_from([50, 95, 99]),
        milliseconds=st.integers(1, 5000),
    ), max_size=2, unique_by=lambda one: (one["metric"], one["percentile"]),
)  # fmt: skip
FLUIDS = st.builds(
    Fluid, rate=st.floats(0.01, 60), prompt=st.floats(10, 30_000), answer=st.floats(2, 2000),
    base=st.floats(0.003, 0.1), per_token=st.floats(1e-9, 1e-6), prefill=st.floats(1e-5, 1e-3),
    capacity=st.integers(40_000, 2_000_000),
)  # fmt: skip


@given(
    FLUIDS, st.integers(1, 4), st.integers(4, 12), st.sampled_from(["auto", "fp8", "k4v4"]), st.booleans(), OBJECTIVES
)
@example(
    Fluid(1.25, 310.0, 1131.0, 2**-6, 9.864041631626275e-07, 0.0008409811499457773, 40_000), 1, 4, "auto", False, []
)
@example(
    Fluid(2.0, 946.0, 582.0, 2**-6, 1e-06, 0.00025799676602872583, 247_755), 1, 4, "fp8", True,
    [{"metric": "ITL", "percentile": 50, "milliseconds": 2000}],
)  # fmt: skip
@settings(max_examples=60)
def test_under_a_constant_load_only_one_scale_in_a_day_is_tried(load, least, most, dtype, known, objectives):
    limits = spec(scaling={"minReplicas": least, "maxReplicas": most, "objectives": objectives})
    s = PolicyInput(NOW, limits, Workload("NoMetrics"), dtype, least, least, H200, LLAMA if known else None)
    taken, bound, seen, given_back = [], False, {}, None
    for quarter in range(QUARTERS):
        now = NOW + QUARTER * quarter
        key = (s.dtype, s.replicas, bound)
        if key not in seen:
            window = load.window(now, s.dtype, s.replicas)
            seen[key] = classify(
                window, limits.kv_cache.pressure, now, was_bound=bound, objectives=limits.scaling.objectives
            )
        bound = seen[key].kind == "MemoryBound"
        decision = choose_step(replace(s, now=now, workload=seen[key]))
        chosen = decision.chosen
        if chosen.action != "Stay":
            taken.append((quarter, chosen.action, chosen.dtype, chosen.replicas))
        given_back, known_few = backoff(chosen.action, s.dtype, s.replicas, now, given_back, s.scale_in_backoff)
        s = replace(
            s, dtype=chosen.dtype, replicas=chosen.replicas, ready=chosen.replicas, saturations=decision.saturations,
            scale_in_backoff=known_few,
            dtype_changed=now if chosen.dtype != s.dtype else s.dtype_changed,
            replicas_changed=now if chosen.replicas != s.replicas else s.replicas_changed,
        )  # fmt: skip
    late = [t for t in taken if t[0] >= CALM]
    # With fewer replicas, a full cache may slow the batch so much that requests queue for ever. With more replicas the
    # cache is emptier, so the policy tries again after HOLD, and reverts the step at once.
    tries = (QUARTERS - CALM) * QUARTER // HOLD + 1
    assert {t[1] for t in late} <= {"ScaleIn", "ScaleOut"}, taken
    assert len(late) <= 2 * tries, taken
    assert len([t for t in taken if t[1].startswith("Dtype")]) <= 4, taken
