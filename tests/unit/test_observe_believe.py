"""From pages to a Sample: what an engine did counts once, whatever came between; what it cannot have done, never."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.observe.believe import LASTING_PAGES, Judged, Known, believe
from kvpilot_operator.observe.increments import LONGEST_GAP_SECONDS
from kvpilot_operator.observe.page import PodMetrics, Totals, parse_page
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.snapshot import Flows
from support.engine_model import EngineModel

T0 = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
START = T0.timestamp() - 3600
DATA = Path(__file__).parent / "data"
IDLE = PodMetrics(0.0, "vllm:kv_cache_usage_perc", 0, 0, 16_000, 1000, "auto", process_start=START)
BUSY = replace(IDLE, usage=0.6, running=8)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


class Fleet:
    """Calls believe as a scrape loop does."""

    def __init__(self) -> None:
        self.known: Mapping[str, Known] = {}

    def scrape(self, seconds: float, pages: Mapping[str, PodMetrics], **more: object) -> Judged:
        judged = believe(at(seconds), self.known, pages, **more)  # type: ignore[arg-type]
        self.known = judged.known
        return judged

    def watch(self, pages: Callable[[int], Mapping[str, PodMetrics]], count: int) -> list[Judged]:
        """`count` scrapes every five seconds; `pages` gets the scrape's number."""
        return [self.scrape(5 * i, pages(i)) for i in range(count)]


def counted(page: PodMetrics, **totals: float | Histogram) -> PodMetrics:
    return replace(page, totals=replace(page.totals, **totals))  # type: ignore[arg-type]


# What happened, between two pages.


def test_the_first_page_of_a_pod_tells_gauges_and_no_flows() -> None:
    sample = Fleet().scrape(0, {"a": counted(BUSY, preemptions=1e4, generation_tokens=1e9)}).sample
    assert (sample.pods, sample.usage, sample.running) == (1, 0.6, 8)
    assert sample.flows == Flows()


def test_two_pages_of_a_real_engine() -> None:
    early, later = (parse_page((DATA / f"vllm-0.32.0-{name}.txt").read_text()) for name in ("early", "later"))
    fleet = Fleet()
    fleet.scrape(0, {"a": early})
    judged = fleet.scrape(5, {"a": later})
    flows = judged.sample.flows
    assert judged.sample.doubted == ()
    assert (flows.seconds, flows.preemptions, flows.failed) == (5, 0, 0)
    assert (flows.prompt_tokens, flows.generation_tokens, flows.finished) == (1600, 4192, 16)
    assert flows.ttft.count == 16
    assert flows.itl.count == 4192 - 16
    assert flows.generation_lengths.total == 16 * 300
    assert 0.9 < flows.decode_seconds / flows.itl.total < 1.1


def test_the_flows_of_pods_add_up() -> None:
    fleet = Fleet()
    fleet.scrape(0, {"a": BUSY, "b": BUSY})
    pages = {"a": counted(BUSY, prompt_tokens=100), "b": counted(BUSY, prompt_tokens=20), "c": BUSY}
    flows = fleet.scrape(5, pages).sample.flows
    assert (flows.prompt_tokens, flows.seconds) == (120, 10)


def test_missed_scrapes_are_made_up_for_by_the_next_page() -> None:
    fleet = Fleet()
    fleet.scrape(0, {"a": BUSY, "b": BUSY})
    fleet.scrape(5, {"b": BUSY})
    flows = fleet.scrape(65, {"a": counted(BUSY, prompt_tokens=100), "b": BUSY}).sample.flows
    assert (flows.prompt_tokens, flows.seconds) == (100, 65 + 60)


def test_after_a_gap_that_is_too_long_a_page_counts_as_the_first() -> None:
    fleet = Fleet()
    fleet.scrape(0, {"a": BUSY})
    late = LONGEST_GAP_SECONDS + 1
    assert fleet.scrape(late, {"a": counted(BUSY, preemptions=1000)}).sample.flows == Flows()
    assert fleet.scrape(late + 5, {"a": counted(BUSY, preemptions=1001)}).sample.flows.preemptions == 1


def test_a_restarted_engine_counts_from_zero() -> None:
    fleet = Fleet()
    fleet.scrape(0, {"a": counted(BUSY, preemptions=7, prompt_tokens=1000, prefill_seconds=50.0)})
    new = counted(BUSY, preemptions=9, prompt_tokens=300, prefill_seconds=2.0)
    flows = fleet.scrape(60, {"a": replace(new, process_start=at(40).timestamp())}).sample.flows
    assert (flows.preemptions, flows.prompt_tokens, flows.prefill_seconds) == (9, 300, 2.0)
    assert flows.seconds == 20


def test_a_counter_that_fell_counts_from_zero_and_the_others_go_on() -> None:
    page = replace(BUSY, process_start=None)
    fleet = Fleet()
    fleet.scrape(0, {"a": counted(page, preemptions=7, prompt_tokens=1000, generation_tokens=500)})
    flows = fleet.scrape(5, {"a": counted(page, preemptions=2, prompt_tokens=1100, generation_tokens=0)}).sample.flows
    assert (flows.preemptions, flows.prompt_tokens, flows.generation_tokens, flows.seconds) == (2, 100, 0, 5)


def test_a_clock_that_is_set_is_no_restart() -> None:
    fleet = Fleet()
    fleet.scrape(0, {"a": counted(BUSY, preemptions=1000)})
    moved = replace(counted(BUSY, preemptions=1001), process_start=START + 1.5)
    assert fleet.scrape(5, {"a": moved}).sample.flows.preemptions == 1


def test_a_histogram_of_other_buckets_counts_from_zero() -> None:
    fleet = Fleet()
    fleet.scrape(0, {"a": counted(BUSY, ttft=Histogram((1.0,), (5, 5), 10.0))})
    other = Histogram((2.0,), (3, 1), 4.0)
    assert fleet.scrape(5, {"a": counted(BUSY, ttft=other)}).sample.flows.ttft == other


def test_a_histogram_of_which_one_bucket_fell_counts_from_zero() -> None:
    fleet = Fleet()
    fleet.scrape(0, {"a": counted(BUSY, ttft=Histogram((1.0,), (5, 5), 10.0))})
    new = Histogram((1.0,), (9, 4), 8.0)
    assert fleet.scrape(5, {"a": counted(BUSY, ttft=new)}).sample.flows.ttft == new


def test_request_seconds_that_fall_are_no_restart() -> None:
    fleet = Fleet()
    fleet.scrape(0, {"a": counted(BUSY, finished=100, prefill_seconds=500.0, decode_seconds=900.0)})
    failed = counted(BUSY, finished=101, errors=1, prefill_seconds=-4e5, decode_seconds=901.0)
    flows = fleet.scrape(5, {"a": failed}).sample.flows
    assert (flows.prefill_seconds, flows.decode_seconds, flows.finished, flows.failed) == (0.0, 1.0, 1, 1)


def test_an_error_that_is_an_http_500_too_fails_one_request() -> None:
    fleet = Fleet()
    fleet.scrape(0, {"a": BUSY})
    flows = fleet.scrape(5, {"a": counted(BUSY, finished=10, errors=2, server_errors=3)}).sample.flows
    assert (flows.failed, flows.finished) == (3, 11)


def test_pods_that_gave_no_page_are_counted_and_gauges_are_of_the_others() -> None:
    sample = Fleet().scrape(0, {"a": BUSY}, unanswered=2).sample
    assert (sample.pods, sample.unanswered) == (1, 2)


def test_use_is_weighted_by_capacity_and_counts_add_up() -> None:
    small = replace(BUSY, usage=0.2, capacity_tokens=8_000, waiting=3)
    sample = Fleet().scrape(0, {"a": replace(BUSY, waiting=3), "b": small}).sample
    assert sample.usage == pytest.approx((0.6 * 2 + 0.2) / 3)
    assert (sample.capacity_tokens, sample.running, sample.waiting) == (24_000, 16, 6)


STEPS = st.lists(st.tuples(st.sampled_from(["run", "run", "run", "miss", "restart"]), st.integers(1, 60)), max_size=30)


@given(steps=STEPS, tells_start=st.booleans())
def test_what_is_seen_of_a_counter_is_what_happened_less_what_restarts_hid(
    steps: list[tuple[str, int]], tells_start: bool
) -> None:
    """Exactly all of it without restarts; with them never more, and a restart hides nothing that came after it."""
    fleet, now, total, happened, seen = Fleet(), 0.0, 0.0, 0.0, 0.0
    start = START if tells_start else None
    after_restart, hidden = 0.0, False
    fleet.scrape(now, {"a": replace(BUSY, process_start=start)})
    for what, much in steps:
        now += 7
        if what == "restart":
            total, hidden, after_restart = 0.0, True, 0.0
            start = at(now).timestamp() - 6 if tells_start else None
        total += much
        happened += much
        after_restart += much
        if what != "miss":
            page = counted(replace(BUSY, process_start=start), prompt_tokens=total)
            flows = fleet.scrape(now, {"a": page}).sample.flows
            seen += flows.prompt_tokens
            if what == "restart":
                assert flows.prompt_tokens <= total
                assert not tells_start or flows.prompt_tokens == total
    fleet_end = fleet.scrape(now + 7, {"a": counted(replace(BUSY, process_start=start), prompt_tokens=total)})
    seen += fleet_end.sample.flows.prompt_tokens
    assert seen <= happened
    if not hidden:
        assert seen == happened
    elif tells_start:
        assert seen >= after_restart


# Who is believed.


def engines(rng: random.Random, count: int) -> list[EngineModel]:
    blocks, size, seqs = rng.choice([8, 60, 200]), rng.choice([16, 128]), rng.choice([2, 8, 32])
    chunk, start = rng.choice([64, 512, 4096]), rng.choice([None, START])
    return [
        EngineModel(rng, blocks=blocks, block_size=size, max_seqs=seqs, chunk=chunk, process_start=start)
        for _ in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), pods=st.integers(1, 4), load=st.floats(0, 3), shared=st.sampled_from([0.0, 0.9]))
def test_honest_engines_are_never_doubted_and_all_of_their_work_is_counted(
    seed: int, pods: int, load: float, shared: float
) -> None:
    rng = random.Random(seed)
    fleet, models = Fleet(), engines(rng, pods)
    prompt, output = rng.choice([(20, 200), (400, 40), (3000, 4)])
    quiet_from = rng.randrange(40)
    seen, before = Flows(), [model.totals for model in models]
    fleet.scrape(0, {str(i): model.page() for i, model in enumerate(models)})
    restarts, skipped = 0, 0
    for scrape in range(1, 40):
        for _ in range(10):
            for model in models:
                if scrape < quiet_from and rng.random() < load / 3:
                    model.arrive(rng.randrange(1, 2 * prompt), rng.randrange(1, 2 * output), shared=shared)
                if rng.random() < 0.02:
                    model.leave()
                model.step(0.5)
        if rng.random() < 0.03:
            restarts += 1
            model = rng.choice(models)
            model.restart(None if model.start is None else at(5 * scrape - 1).timestamp())
        pages = {str(i): model.page() for i, model in enumerate(models) if scrape == 39 or rng.random() < 0.9}
        judged = fleet.scrape(5 * scrape, pages)
        assert judged.sample.doubted == ()
        skipped += len(pages) - judged.sample.pods
        seen += judged.sample.flows
    # A page on which somebody waits at the very moment that nothing runs is odd once: it is left out, not doubted.
    assert skipped <= 2
    for name in ("prompt_tokens", "generation_tokens", "finished", "prefill_seconds", "decode_seconds"):
        did = sum(getattr(m.totals, name) - getattr(b, name) for m, b in zip(models, before, strict=True))
        if not restarts:
            assert getattr(seen, name) == pytest.approx(did)
    if not restarts and pods < 3:
        assert seen.preemptions == sum(model.totals.preemptions for model in models)
    if not restarts:
        assert seen.itl.count == sum(model.totals.itl.count for model in models)


def test_the_model_of_an_engine_does_preempt_and_does_queue() -> None:
    model = EngineModel(random.Random(0), blocks=60)
    full = waited = 0
    for _ in range(400):
        model.arrive(60, 100)
        model.step(0.5)
        full += model.page().usage > 0.95
        waited += model.page().waiting > 0
    assert model.totals.preemptions > 0
    assert full > 100
    assert waited > 100


def held(i: int) -> PodMetrics:
    return replace(IDLE, usage=0.95, waiting=50)


def waits(i: int) -> PodMetrics:
    return replace(IDLE, waiting=50)


def crowded(i: int) -> PodMetrics:
    return counted(replace(IDLE, running=400, usage=0.001), generation_tokens=1000 * i)


def preempts(i: int) -> PodMetrics:
    return counted(replace(BUSY, usage=0.1), preemptions=30 * i, generation_tokens=100 * i)


def stuck(i: int) -> PodMetrics:
    return counted(replace(IDLE, usage=0.95, running=1 + 7 * (i % 2)), generation_tokens=5000 * i)


def too_fast(i: int) -> PodMetrics:
    return counted(BUSY, generation_tokens=10**9 * i)


@pytest.mark.parametrize(
    ("lie", "word"),
    [
        (held, "while nothing runs"),
        (waits, "requests wait while nothing runs"),
        (crowded, "400 requests run in 1 blocks"),
        (preempts, "too few tokens flow"),
        (stuck, "stands at exactly 0.9500"),
        (too_fast, "no engine does more"),
    ],
)
def test_a_pod_that_lies_is_named_and_left_out(lie: Callable[[int], PodMetrics], word: str) -> None:
    last = Fleet().watch(lambda i: {"honest": BUSY, "liar": lie(i)}, 12)[-1].sample
    assert (last.pods, last.usage, last.running, last.waiting) == (1, 0.6, 8, 0)
    [doubt] = last.doubted
    assert doubt.startswith("liar: ")
    assert word in doubt


@pytest.mark.parametrize("lie", [held, waits, crowded])
def test_a_page_that_contradicts_itself_never_counts_even_before_its_pod_is_named(
    lie: Callable[[int], PodMetrics],
) -> None:
    judged = Fleet().watch(lambda i: {"honest": BUSY, "liar": lie(i) if i > 1 else BUSY}, 12)
    named = [bool(one.sample.doubted) for one in judged]
    assert named == [False] * (1 + LASTING_PAGES) + [True] * (12 - 1 - LASTING_PAGES)
    assert {one.sample.usage for one in judged} == {0.6}
    assert {one.sample.waiting for one in judged} == {0}
    assert all(len(one.sample.doubted) + one.sample.unanswered == 1 for one in judged[3:])


def test_one_odd_page_is_nothing_to_name_a_pod_for() -> None:
    judged = Fleet().watch(lambda i: {"a": held(i) if i % 4 == 3 else BUSY}, 40)
    assert all(one.sample.doubted == () for one in judged)


def test_a_few_odd_pages_far_apart_are_nothing_to_name_a_pod_for() -> None:
    fleet = Fleet()
    named = [bool(fleet.scrape(30 * i, {"a": held(i)}).sample.doubted) for i in range(LASTING_PAGES)]
    assert named == [False] * (LASTING_PAGES - 1) + [True]


def test_use_may_stand_still_while_as_many_requests_run() -> None:
    """Windows and state-space layers take the same room at any length."""
    judged = Fleet().watch(lambda i: {"a": counted(replace(BUSY, usage=0.95), generation_tokens=50_000 * i)}, 40)
    assert all(one.sample.pods == 1 for one in judged)


def test_a_pod_that_tells_of_a_new_process_at_every_scrape_is_doubted_no_later() -> None:
    def reborn(i: int) -> dict[str, PodMetrics]:
        return {"a": replace(held(i), process_start=at(5 * i - 1).timestamp())}

    assert Fleet().watch(reborn, 12)[-1].sample.doubted


def test_a_pod_that_tells_the_truth_again_is_believed_again() -> None:
    fleet = Fleet()
    fleet.watch(lambda i: {"a": held(i)}, 12)
    assert fleet.scrape(60, {"a": BUSY}).sample.pods == 1


def test_where_nobody_is_believed_there_is_no_pod() -> None:
    last = Fleet().watch(lambda i: {"a": held(i), "b": held(i)}, 12)[-1].sample
    assert (last.pods, last.usage, last.waiting, last.capacity_tokens) == (0, 0, 0, 0)
    assert len(last.doubted) == 2


def test_capacity_that_is_far_from_the_others_is_not_believed() -> None:
    for capacity, word in ((40_000, "40000"), (7_000, "7000")):
        pages = {"a": BUSY, "b": BUSY, "liar": replace(BUSY, capacity_tokens=capacity)}
        sample = Fleet().scrape(0, pages).sample
        assert (sample.pods, sample.capacity_tokens) == (2, 32_000)
        assert word in sample.doubted[0]


def test_pods_on_other_gpus_may_have_another_capacity() -> None:
    pages = {"a": BUSY, "b": BUSY, "c": replace(BUSY, capacity_tokens=50_000)}
    gpus = {"a": "H100", "b": "H100", "c": "H200"}
    assert Fleet().scrape(0, pages, gpus=gpus).sample.pods == 3


def test_of_two_pods_nobody_can_say_whose_capacity_is_wrong() -> None:
    assert Fleet().scrape(0, {"a": BUSY, "b": replace(BUSY, capacity_tokens=50_000)}).sample.doubted == ()


def test_the_dtype_is_what_most_pods_say() -> None:
    assert Fleet().scrape(0, {"a": replace(BUSY, dtype="fp8"), "b": BUSY, "c": BUSY}).sample.observed_dtype == "auto"


@given(
    others=st.lists(st.integers(0, 50), min_size=2, max_size=6),
    lie=st.integers(0, 1_000_000),
    preempted=st.integers(0, 400_000),
)
def test_of_three_pods_one_alone_cannot_put_memory_under_pressure(others: list[int], lie: int, preempted: int) -> None:
    pages = {str(i): replace(BUSY, waiting=waiting) for i, waiting in enumerate(others)} | {"liar": BUSY}
    fleet = Fleet()
    fleet.scrape(0, pages)
    pages |= {str(i): counted(pages[str(i)], preemptions=waiting) for i, waiting in enumerate(others)}
    pages["liar"] = counted(replace(BUSY, waiting=lie), preemptions=preempted)
    judged = fleet.scrape(5, pages)
    most = sum(others) + max(others)
    assert judged.sample.waiting <= most
    assert judged.sample.flows.preemptions <= most
    if lie > 2 * max(others) + 10:
        assert any(f"liar: waiting {lie}, counted as {max(others)}" in words for words in judged.cut)


def test_every_field_of_the_totals_becomes_a_flow() -> None:
    known = {f.name for f in fields(Flows)} | {"errors", "server_errors"}
    assert {f.name for f in fields(Totals)} <= known
