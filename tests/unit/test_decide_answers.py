"""Users' answers, canary against stable: differences that a healthy canary may show, and those that fail it."""

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_operator.decide.rollout.answers import SLICE, bet, differing
from kvpilot_operator.observe.windows import Windows, retention_of
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Flows, Sample
from kvpilot_operator.state.status import parse_status
from support.metrics_pages import parse_page
from support.model_cluster import CAPACITY, ModelCluster
from support.model_engines import LENGTHS, flows
from support.services import KEY, NOW
from support.trials import BUSY, NEW, OLD, ended, on_trial, service, stage

SCRAPE = timedelta(seconds=5)
LONG_STEPS = [{"weightPercent": 50, "holdSeconds": 300}]


def side(*scrapes: Flows) -> tuple[Sample, ...]:
    """Return one side's samples. The first one only begins the window."""
    return tuple(
        Sample(NOW + SCRAPE * i, 1, 0.5, 4.0, 0.0, 1000, "auto", one) for i, one in enumerate((Flows(), *scrapes))
    )


def difference(ours: tuple[Sample, ...], theirs: tuple[Sample, ...]) -> str | None:
    return differing(theirs, ours, NOW, NOW + SCRAPE * 10_000)


def answered(lengths: np.ndarray, cut: np.ndarray) -> Flows:
    """Return vLLM's counters after answers of these lengths. `cut` is true for answers that reached max_tokens."""
    counts = np.bincount(np.searchsorted(LENGTHS, lengths), minlength=len(LENGTHS) + 1)
    n = float(len(lengths))
    return Flows(
        seconds=5.0,
        prompt_tokens=400 * n,
        generation_tokens=float(lengths.sum()),
        finished=n,
        stopped=n - float(cut.sum()),
        asked_tokens=4096 * n,
        generation_lengths=Histogram(LENGTHS, tuple(map(float, counts)), float(lengths.sum())),
    )


def clustered(rng: np.random.Generator, requests: int, kind: str) -> Flows:
    """Return the counters of a slice of time in which few users send many requests, each with similar answers."""
    users = rng.integers(0, max(2, requests // 5), requests)
    if kind == "heavy tail":
        of_user = 30 * rng.pareto(1.1, requests) + 1
    elif kind == "two kinds":
        of_user = np.where(rng.random(requests) < 0.5, 15.0, 1200.0)
    else:
        of_user = 200 * np.exp(1.2 * rng.standard_normal(requests))
    lengths = np.minimum(of_user[users] * np.exp(0.2 * rng.standard_normal(requests)), 4096).round().clip(1)
    return answered(lengths, rng.random(requests)[users] < 0.3)


@pytest.mark.parametrize("kind", ["heavy tail", "two kinds", "log-normal"])
@pytest.mark.parametrize(("few", "many"), [(SLICE, SLICE), (SLICE, 20 * SLICE), (20 * SLICE, SLICE)])
def test_healthy_canaries_do_not_fail_even_if_answers_of_a_slice_resemble_each_other(kind, few, many):
    rng = np.random.default_rng(7)
    for _ in range(10):
        ours, theirs = ([clustered(rng, n, kind) for _ in range(100)] for n in (few, many))
        assert difference(side(*ours), side(*theirs)) is None


@given(st.floats(0, 1e9), st.integers(1, 10**6))
def test_a_bet_wins_nothing_on_average_if_half_of_the_slices_are_far_off(wealth, n):
    assert (bet(wealth, n, True) + bet(wealth, n, False)) / 2 == pytest.approx(wealth + 1 / (n * (n + 1)))


def test_the_weights_of_slices_in_a_bet_sum_to_one():
    assert sum(1 / (n * (n + 1)) for n in range(1, 10**5)) == pytest.approx(1, abs=1e-4)


GOOD, ODD = flows(12.0), flows(12.0, tokens=2000.0, stopped=0.0)


@given(st.lists(st.sampled_from((GOOD, ODD)), max_size=24))
def test_fewer_than_25_slices_of_time_never_fail_a_canary(scrapes):
    assert difference(side(*scrapes), side(*[GOOD] * len(scrapes))) is None


@given(st.lists(st.floats(0.0, 60.0), min_size=1, max_size=60), st.floats(1.0, 4000.0), st.floats(0.0, 1.0))
def test_equal_answers_of_canary_and_stable_never_differ(requests, tokens, stopped):
    same = side(*(flows(one, tokens=tokens, stopped=stopped) for one in requests))
    assert difference(same, same) is None


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ({"tokens": 500.0}, ("are far longer", "median length 441 and 88 tokens", "312 and 1040 answers")),
        ({"tokens": 20.0}, ("are far shorter", "median length 18 and 88 tokens")),
        ({"stopped": 0.4}, ("end by themselves far less often", "60% and 10% with finished_reason not stop")),
    ],
)
def test_answers_that_differ_beyond_chance_fail_the_canary_with_the_figures_of_both_sides(ours, words):
    found = difference(side(*[flows(12.0, **ours)] * 40), side(*[flows(40.0)] * 40))
    assert found is not None
    assert all(word in found for word in words), found


def test_answers_half_as_long_are_not_far_off():
    milder = {"tokens": 200.0, "stopped": 0.75}
    assert difference(side(*[flows(50.0, **milder)] * 200), side(*[flows(50.0)] * 200)) is None


@pytest.mark.parametrize("asked", [{"prompt_tokens": 12_000.0}, {"asked_tokens": 12_000.0}])
def test_sides_with_different_requests_are_not_compared(asked):
    ours = [replace(ODD, **asked)] * 100
    assert difference(side(*ours), side(*[GOOD] * 100)) is None


def test_unfinished_long_answers_do_not_make_a_new_side_look_short():
    unfinished = [replace(flows(12.0, tokens=20.0), generation_tokens=1200.0)]
    assert difference(side(*unfinished * 100), side(*[GOOD] * 100)) is None


def test_damage_that_begins_late_is_found_too():
    late = [GOOD] * 100 + [ODD] * 50
    assert difference(side(*late), side(*[GOOD] * 150)) is not None


# --- whole decisions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [(600.0, 0.9), (15.0, 0.9), (100.0, 0.3)])
def test_a_canary_that_answers_probes_well_and_users_badly_is_rolled_back(answers):
    # Short answers also have fewer tokens per second, because their prefill takes more of the time.
    any_speed = {"maxThroughputRegressionPercent": 100}
    cluster = on_trial(cluster={"answers": {NEW: answers}}, steps=LONG_STEPS, **any_speed)
    status = cluster.until(stage("RollingBack"))
    assert (status.canary.verdict, status.canary.reason) == ("Failed", "AccuracyRegressed")
    assert "users' answers" in status.canary.message
    assert [(d.dtype, d.reason) for d in status.kv_cache.denied] == [(NEW, "AccuracyRegressed")]
    assert cluster.until(ended).kv_cache.active_dtype == OLD


def test_answers_of_another_image_are_not_compared():
    cluster = ModelCluster(service(OLD, steps=LONG_STEPS), start_ticks=2, requests=BUSY, answers={NEW: (600.0, 0.9)})
    cluster.settle()
    wanted = service(NEW, steps=LONG_STEPS)
    wanted["spec"]["engine"]["image"] = "kvpilot/runtime:2"
    cluster.edit(wanted)
    assert cluster.until(ended).last_trial.verdict == "Passed"


def page(total: Flows, dtype: str) -> str:
    """Return the metrics page of an engine with these totals, by vLLM's names."""
    stopped, finished = int(total.stopped), int(total.finished)
    lines = [
        "vllm:kv_cache_usage_perc 0.5",
        "vllm:num_requests_running 4",
        f'vllm:cache_config_info{{block_size="16",cache_dtype="{dtype}",num_gpu_blocks="{CAPACITY[dtype]}"}} 1',
        f"vllm:prompt_tokens_total {total.prompt_tokens}",
        f"vllm:generation_tokens_total {total.generation_tokens}",
        f'vllm:request_success_total{{finished_reason="stop"}} {stopped}',
        f'vllm:request_success_total{{finished_reason="length"}} {finished - stopped}',
        f"vllm:request_params_max_tokens_sum {total.asked_tokens}",
        f"vllm:request_prefill_time_seconds_sum {total.prefill_seconds}",
        f"vllm:request_decode_time_seconds_sum {total.decode_seconds}",
    ]
    for name, one in (
        ("time_to_first_token_seconds", total.ttft),
        ("inter_token_latency_seconds", total.itl),
        ("request_generation_tokens", total.generation_lengths),
    ):
        edges = [*map(str, one.bounds), "+Inf"]
        reached = itertools.accumulate(one.counts)
        lines += [f'vllm:{name}_bucket{{le="{edge}"}} {int(n)}' for edge, n in zip(edges, reached, strict=True)]
        lines.append(f"vllm:{name}_sum {one.total}")
    return "\n".join(lines) + "\n"


class Paged(ModelCluster):
    """Cluster whose samples come from metrics pages, one for each revision, as the operator reads them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.windows = Windows(KEY)
        spec = self.snapshot().spec
        assert spec is not None
        self.windows.retention = retention_of(spec, trial=True)
        self.totals: dict[str, Flows] = {}

    def _scrape(self) -> None:
        super()._scrape()
        for name, (dtype, _) in self.deployments.items():
            latest = self.samples.get(name, ())[-1:]
            if latest and latest[0].time == self.now:
                self.totals[name] = Flows.together([latest[0].flows, self.totals.get(name, Flows())])
                self.windows.add(name, self.now, {f"{name}-0": parse_page(page(self.totals[name], dtype))})
        self.samples = {name: list(one) for name, one in self.windows.samples().items()}


@pytest.mark.parametrize(("answers", "verdict"), [((600.0, 0.1), "Failed"), ((120.0, 0.85), "Passed")])
def test_the_verdict_follows_from_the_metrics_of_both_sides(answers: Any, verdict: str):
    cluster = Paged(service(OLD, steps=LONG_STEPS), start_ticks=2, requests=BUSY, answers={NEW: answers})
    cluster.settle()
    cluster.edit(service(NEW, steps=LONG_STEPS))
    status = cluster.until(ended)
    assert status.last_trial.verdict == verdict
    if verdict == "Failed":
        assert "with finished_reason not stop" in parse_status(cluster.status).last_trial.message
