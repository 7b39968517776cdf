"""Impossible counters of an engine are ignored, and the operator names a pod that keeps reporting them."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_cli.backtest.batch import Limits, Request
from kvpilot_cli.backtest.costs import Costs
from kvpilot_cli.backtest.engine import Engine
from kvpilot_operator.observe.plausible import LASTING_PAGES, MOST_NAMED
from kvpilot_operator.observe.pod_metrics import PodMetrics, Totals
from kvpilot_operator.state.samples import Flows
from support.scrape_loop import BUSY, IDLE, START, ScrapeLoop, at, busy, counted


class Paged:
    """Simulated engine and its metrics page. Each step takes half a second."""

    def __init__(self, blocks: int, size: int, limits: Limits, start: float | None) -> None:
        self._blocks, self._size, self._limits = blocks, size, limits
        self._number = 0
        self.restart(0, start)

    def restart(self, now: float, start: float | None) -> None:
        """End the process with all its requests, and start a new one."""
        self.start = start
        self._engine = Engine(Costs(0.5, 0, 0, 0, 0, self._blocks * self._size, self._size), self._limits)
        self._engine.advance(now)
        self._engine.scrape()
        self.totals = Totals()

    def arrive(self, now: float, prompt: int, output: int, session: int) -> None:
        self._number += 1
        self._engine.submit(Request(self._number, now, prompt, output, session))

    def page(self, now: float) -> PodMetrics:
        self._engine.advance(now)
        seen = self._engine.scrape()
        self.totals = Totals.together((self.totals, seen.flows))
        return PodMetrics(
            seen.usage, seen.running, seen.waiting, self._blocks * self._size, self._blocks, "auto",
            process_start=self.start, totals=self.totals,
        )  # fmt: skip


def engines(rng: random.Random, count: int) -> list[Paged]:
    blocks, size, seqs = rng.choice([8, 60, 200]), rng.choice([16, 128]), rng.choice([2, 8, 32])
    limits, start = Limits(seqs, rng.choice([64, 512, 4096]), timeout=rng.choice([5, 120])), rng.choice([None, START])
    return [Paged(blocks, size, limits, start) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), pods=st.integers(1, 4), load=st.floats(0, 3), sessions=st.sampled_from([0, 3]))
def test_sound_engines_never_count_as_implausible(seed: int, pods: int, load: float, sessions: int) -> None:
    rng = random.Random(seed)
    fleet, models = ScrapeLoop(), engines(rng, pods)
    prompt, output = rng.choice([(20, 200), (400, 40), (3000, 4)])
    quiet_from = rng.randrange(40)
    seen = Flows()
    fleet.scrape(0, {str(i): model.page(0) for i, model in enumerate(models)})
    restarts = 0
    for scrape in range(1, 40):
        for tenth in range(10):
            for model in models:
                if scrape < quiet_from and rng.random() < load / 3:
                    session = rng.randrange(sessions) if sessions else -1
                    lengths = rng.randrange(1, 2 * prompt), rng.randrange(1, 2 * output)
                    model.arrive(5 * (scrape - 1) + tenth / 2, *lengths, session)
        if rng.random() < 0.03:
            restarts += 1
            model, now = rng.choice(models), 5 * scrape - 1
            model.restart(now, None if model.start is None else at(now).timestamp())
        told = {str(i): model.page(5 * scrape) for i, model in enumerate(models)}
        pages = {name: page for name, page in told.items() if scrape == 39 or rng.random() < 0.9}
        judged = fleet.scrape(5 * scrape, pages)
        assert judged.implausible == judged.stalled == ()
        seen = Flows.together((seen, judged.flows))
    # A page may be left out of a sample if its counters stood still during a long prefill. The sums are still equal,
    # because such a page would add nothing.
    if not restarts:
        did = Flows.together([model.totals for model in models])
        for name in ("prompt_tokens", "generation_tokens", "finished", "prefill_seconds", "decode_seconds"):
            assert getattr(seen, name) == pytest.approx(getattr(did, name))
        assert seen.itl.count == pytest.approx(did.itl.count)
        if pods < 3:
            assert seen.preemptions == did.preemptions


def test_the_simulated_engine_preempts_and_queues_under_this_load() -> None:
    model = Paged(60, 16, Limits(16, 512), None)
    pages = []
    for second in range(200):
        model.arrive(second, 60, 100, -1)
        pages.append(model.page(second))
    assert pages[-1].totals.preemptions > 0
    assert sum(page.usage > 0.95 for page in pages) > 50
    assert sum(page.waiting > 0 for page in pages) > 50


def held(i: int) -> PodMetrics:
    return replace(IDLE, usage=0.95, waiting=50)


def crowded(i: int) -> PodMetrics:
    return counted(replace(IDLE, running=400, usage=0.001), generation_tokens=1000 * i)


def preempts(i: int) -> PodMetrics:
    return counted(replace(BUSY, usage=0.1), preemptions=30 * i, generation_tokens=100 * i)


def too_fast(i: int) -> PodMetrics:
    return counted(BUSY, generation_tokens=10**9 * i)


@pytest.mark.parametrize(
    ("lie", "word"),
    [
        (held, "while nothing runs"),
        (crowded, "400 requests run in 1 blocks"),
        (preempts, "too few tokens to fill"),
        (too_fast, "no engine does more"),
    ],
)
def test_an_implausible_pod_is_named_and_left_out(lie: Callable[[int], PodMetrics], word: str) -> None:
    last = ScrapeLoop().watch(lambda i: {"honest": busy(i), "liar": lie(i)}, 12)[-1]
    assert (last.pods, last.usage, last.running, last.waiting) == (1, 0.6, 8, 0)
    [doubt] = last.implausible
    assert doubt.startswith("liar: ")
    assert word in doubt


@pytest.mark.parametrize("lie", [held, crowded])
def test_a_contradictory_page_never_counts_even_before_its_pod_is_named(
    lie: Callable[[int], PodMetrics],
) -> None:
    judged = ScrapeLoop().watch(lambda i: {"honest": busy(i), "liar": lie(i) if i > 1 else busy(i)}, 12)
    named = [bool(one.implausible) for one in judged]
    assert named == [False] * (1 + LASTING_PAGES) + [True] * (12 - 1 - LASTING_PAGES)
    assert {one.usage for one in judged} == {0.6}
    assert {one.waiting for one in judged} == {0}
    assert all(len(one.implausible) + one.unanswered == 1 for one in judged[3:])


def test_one_contradictory_page_does_not_make_a_pod_implausible() -> None:
    judged = ScrapeLoop().watch(lambda i: {"a": held(i) if i % 4 == 3 else busy(i)}, 40)
    assert all(one.implausible == () for one in judged)


def test_a_few_contradictory_pages_far_apart_do_not_make_a_pod_implausible() -> None:
    fleet = ScrapeLoop()
    named = [bool(fleet.scrape(30 * i, {"a": held(i)}).implausible) for i in range(LASTING_PAGES)]
    assert named == [False] * (LASTING_PAGES - 1) + [True]


def test_contradictory_pages_make_a_pod_implausible_even_if_each_is_of_a_new_process() -> None:
    def reborn(i: int) -> dict[str, PodMetrics]:
        return {"a": replace(held(i), process_start=at(5 * i - 1).timestamp())}

    assert ScrapeLoop().watch(reborn, 12)[-1].implausible


def test_a_pod_with_plausible_metrics_again_counts_again() -> None:
    fleet = ScrapeLoop()
    fleet.watch(lambda i: {"a": held(i)}, 12)
    assert fleet.scrape(60, {"a": BUSY}).pods == 1


def test_without_a_plausible_pod_the_sample_has_no_pods() -> None:
    last = ScrapeLoop().watch(lambda i: {"a": held(i), "b": held(i)}, 12)[-1]
    assert (last.pods, last.usage, last.waiting, last.capacity_tokens) == (0, 0, 0, 0)
    assert len(last.implausible) == 2


def test_a_capacity_far_from_the_others_is_implausible() -> None:
    for capacity, word in ((40_000, "40000"), (7_000, "7000")):
        pages = {"a": BUSY, "b": BUSY, "liar": replace(BUSY, capacity_tokens=capacity)}
        sample = ScrapeLoop().scrape(0, pages)
        assert (sample.pods, sample.capacity_tokens) == (2, 32_000)
        assert word in sample.implausible[0]


def test_pods_on_other_gpus_may_have_another_capacity() -> None:
    pages = {"a": BUSY, "b": BUSY, "c": replace(BUSY, capacity_tokens=50_000)}
    gpus = {"a": "H100", "b": "H100", "c": "H200"}
    assert ScrapeLoop().scrape(0, pages, gpus=gpus).pods == 3


def test_capacities_of_two_pods_are_not_compared() -> None:
    assert ScrapeLoop().scrape(0, {"a": BUSY, "b": replace(BUSY, capacity_tokens=50_000)}).implausible == ()


def test_the_dtype_is_the_one_that_most_pods_report() -> None:
    assert ScrapeLoop().scrape(0, {"a": replace(BUSY, dtype="fp8"), "b": BUSY, "c": BUSY}).observed_dtype == "auto"


def test_pods_with_another_dtype_than_most_are_named() -> None:
    pages = {"a": replace(BUSY, dtype="fp8"), "b": BUSY, "c": BUSY, "d": replace(BUSY, dtype="")}
    sample = ScrapeLoop().scrape(0, pages)
    assert (sample.observed_dtype, sample.other_dtypes) == ("auto", (("a", "fp8"),))
    crowded = replace(BUSY, running=1e5, dtype="fp8")
    loop = ScrapeLoop()
    for seconds in (0, 5, 10, 15, 20):
        sample = loop.scrape(seconds, {"a": crowded})
    assert (sample.pods, len(sample.implausible), sample.observed_dtype) == (0, 1, "fp8")


def test_the_recent_window_is_the_one_that_most_pods_report() -> None:
    pages = {"a": replace(BUSY, recent_tokens=64), "b": replace(BUSY, recent_tokens=0), "c": BUSY, "d": BUSY}
    assert ScrapeLoop().scrape(0, pages).recent_tokens == 64
    assert ScrapeLoop().scrape(0, {"c": BUSY}).recent_tokens is None


def test_pods_with_other_calibration_factors_than_most_are_named_and_their_figures_count() -> None:
    one, other = replace(BUSY, factors="aaaa"), replace(BUSY, factors="bbbb")
    sample = ScrapeLoop().scrape(0, {"a": one, "b": other, "c": one, "silent": BUSY})
    assert (sample.factors, sample.mixed) == ("aaaa", (("b", "bbbb"),))
    assert (sample.pods, sample.implausible) == (4, ())
    same = ScrapeLoop().scrape(0, {"a": one, "c": one, "silent": BUSY})
    assert (same.factors, same.mixed) == ("aaaa", ())


@given(st.lists(st.sampled_from(["", "aaaa", "bbbb", "cccc"]), max_size=20), st.randoms())
def test_the_pods_that_are_named_for_other_factors_do_not_depend_on_the_order_of_pods(
    hashes: list[str], rng: random.Random
) -> None:
    pods = [(f"pod-{i:02}", replace(BUSY, factors=factors)) for i, factors in enumerate(hashes)]
    sample = ScrapeLoop().scrape(0, dict(pods))
    assert len(sample.mixed) <= MOST_NAMED
    assert bool(sample.mixed) == (len({factors for factors in hashes if factors}) > 1)
    assert all(hashes.count(factors) <= hashes.count(sample.factors) for _, factors in sample.mixed)
    rng.shuffle(pods)
    again = ScrapeLoop().scrape(0, dict(pods))
    assert (again.factors, again.mixed) == (sample.factors, sample.mixed)


@given(
    others=st.lists(st.integers(0, 50), min_size=2, max_size=6),
    lie=st.integers(0, 1_000_000),
    preempted=st.integers(0, 400_000),
)
def test_one_lying_pod_of_three_cannot_fake_memory_pressure(others: list[int], lie: int, preempted: int) -> None:
    pages = {str(i): replace(BUSY, waiting=waiting) for i, waiting in enumerate(others)} | {"liar": BUSY}
    fleet = ScrapeLoop()
    fleet.scrape(0, pages)
    pages |= {str(i): counted(pages[str(i)], preemptions=waiting) for i, waiting in enumerate(others)}
    pages["liar"] = counted(replace(BUSY, waiting=lie), preemptions=preempted)
    pages = {pod: counted(page, generation_tokens=1) for pod, page in pages.items()}
    judged = fleet.scrape(5, pages)
    most = sum(others) + max(others)
    assert judged.waiting <= most
    assert judged.flows.preemptions <= most
