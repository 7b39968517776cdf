"""A Sample counts an engine's work between two pages exactly once, even after a restart."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_localcluster.engines import PAGE_EARLY, PAGE_LATER
from kvpilot_operator.observe.pod_metrics import LONGEST_GAP_SECONDS, Totals
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import Flows
from support.metrics_pages import parse_page
from support.scrape_loop import BUSY, START, ScrapeLoop, at, busy, counted


def test_the_first_page_of_a_pod_gives_gauges_but_no_increments() -> None:
    sample = ScrapeLoop().scrape(0, {"a": counted(BUSY, preemptions=1e4, generation_tokens=1e9)})
    assert (sample.pods, sample.usage, sample.running) == (1, 0.6, 8)
    assert sample.flows == Flows()


def test_two_pages_of_a_real_engine_give_its_increments() -> None:
    early, later = (parse_page(page.read_text()) for page in (PAGE_EARLY, PAGE_LATER))
    fleet = ScrapeLoop()
    fleet.scrape(0, {"a": early})
    judged = fleet.scrape(5, {"a": later})
    flows = judged.flows
    assert judged.implausible == ()
    assert (flows.seconds, flows.preemptions, flows.failed) == (5, 0, 0)
    assert (flows.prompt_tokens, flows.generation_tokens, flows.finished) == (1600, 4192, 16)
    assert flows.ttft.count == 16
    assert flows.itl.count == 4192 - 16
    assert flows.generation_lengths.total == 16 * 300
    assert 0.9 < flows.decode_seconds / flows.itl.total < 1.1


def test_the_flows_of_pods_add_up() -> None:
    fleet = ScrapeLoop()
    fleet.scrape(0, {"a": BUSY, "b": BUSY})
    pages = {"a": counted(BUSY, prompt_tokens=100), "b": counted(BUSY, prompt_tokens=20), "c": BUSY}
    flows = fleet.scrape(5, pages).flows
    assert (flows.prompt_tokens, flows.seconds) == (120, 10)


def test_the_next_page_includes_the_increments_of_missed_scrapes() -> None:
    fleet = ScrapeLoop()
    fleet.scrape(0, {"a": BUSY, "b": BUSY})
    fleet.scrape(5, {"b": busy(1)})
    flows = fleet.scrape(65, {"a": counted(BUSY, prompt_tokens=100), "b": busy(2)}).flows
    assert (flows.prompt_tokens, flows.seconds) == (100, 65 + 60)


def test_after_a_gap_that_is_too_long_a_page_counts_as_the_first() -> None:
    fleet = ScrapeLoop()
    fleet.scrape(0, {"a": BUSY})
    late = LONGEST_GAP_SECONDS + 1
    assert fleet.scrape(late, {"a": counted(BUSY, preemptions=1000)}).flows == Flows()
    assert fleet.scrape(late + 5, {"a": counted(BUSY, preemptions=1001)}).flows.preemptions == 1


def test_a_restarted_engine_counts_from_zero() -> None:
    fleet = ScrapeLoop()
    fleet.scrape(0, {"a": counted(BUSY, preemptions=7, prompt_tokens=1000, prefill_seconds=50.0)})
    new = counted(BUSY, preemptions=9, prompt_tokens=300, prefill_seconds=2.0)
    flows = fleet.scrape(60, {"a": replace(new, process_start=at(40).timestamp())}).flows
    assert (flows.preemptions, flows.prompt_tokens, flows.prefill_seconds) == (9, 300, 2.0)
    assert flows.seconds == 20


def test_a_counter_that_fell_counts_from_zero_and_the_others_continue() -> None:
    page = replace(BUSY, process_start=None)
    fleet = ScrapeLoop()
    fleet.scrape(0, {"a": counted(page, preemptions=7, prompt_tokens=1000, generation_tokens=500)})
    flows = fleet.scrape(5, {"a": counted(page, preemptions=2, prompt_tokens=1100, generation_tokens=0)}).flows
    assert (flows.preemptions, flows.prompt_tokens, flows.generation_tokens, flows.seconds) == (2, 100, 0, 5)


def test_a_clock_that_is_set_is_not_a_restart() -> None:
    fleet = ScrapeLoop()
    fleet.scrape(0, {"a": counted(BUSY, preemptions=1000)})
    moved = replace(counted(BUSY, preemptions=1001), process_start=START + 1.5)
    assert fleet.scrape(5, {"a": moved}).flows.preemptions == 1


def test_a_histogram_of_other_buckets_counts_from_zero() -> None:
    fleet = ScrapeLoop()
    fleet.scrape(0, {"a": counted(BUSY, ttft=Histogram((1.0,), (5, 5), 10.0))})
    other = Histogram((2.0,), (3, 1), 4.0)
    assert fleet.scrape(5, {"a": counted(busy(1), ttft=other)}).flows.ttft == other


def test_a_histogram_of_which_one_bucket_fell_counts_from_zero() -> None:
    fleet = ScrapeLoop()
    fleet.scrape(0, {"a": counted(BUSY, ttft=Histogram((1.0,), (5, 5), 10.0))})
    new = Histogram((1.0,), (9, 4), 8.0)
    assert fleet.scrape(5, {"a": counted(busy(1), ttft=new)}).flows.ttft == new


def test_falling_request_seconds_are_not_a_restart() -> None:
    fleet = ScrapeLoop()
    fleet.scrape(0, {"a": counted(BUSY, finished=100, prefill_seconds=500.0, decode_seconds=900.0)})
    failed = counted(BUSY, finished=101, errors=1, prefill_seconds=-4e5, decode_seconds=901.0)
    flows = fleet.scrape(5, {"a": failed}).flows
    assert (flows.prefill_seconds, flows.decode_seconds, flows.finished, flows.failed) == (0.0, 1.0, 1, 1)


def test_an_engine_error_that_is_also_an_http_500_counts_as_one_failed_request() -> None:
    fleet = ScrapeLoop()
    fleet.scrape(0, {"a": BUSY})
    flows = fleet.scrape(5, {"a": counted(BUSY, finished=10, errors=2, server_errors=3)}).flows
    assert (flows.failed, flows.finished) == (3, 11)


def test_pods_without_a_page_are_counted_and_gauges_come_from_the_others() -> None:
    sample = ScrapeLoop().scrape(0, {"a": BUSY}, unanswered=2)
    assert (sample.pods, sample.unanswered) == (1, 2)


def test_a_samples_kv_use_is_weighted_by_capacity_and_its_request_counts_add_up() -> None:
    small = replace(BUSY, usage=0.2, capacity_tokens=8_000, waiting=3)
    sample = ScrapeLoop().scrape(0, {"a": replace(BUSY, waiting=3), "b": small})
    assert sample.usage == pytest.approx((0.6 * 2 + 0.2) / 3)
    assert (sample.capacity_tokens, sample.running, sample.waiting) == (24_000, 16, 6)


STEPS = st.lists(st.tuples(st.sampled_from(["run", "run", "run", "miss", "restart"]), st.integers(1, 60)), max_size=30)


@given(steps=STEPS, tells_start=st.booleans())
def test_observed_increments_are_the_true_ones_minus_those_lost_in_restarts(
    steps: list[tuple[str, int]], tells_start: bool
) -> None:
    """Without a restart, all work counts. With restarts, at least the work after the last one counts."""
    fleet, now, total, happened, seen = ScrapeLoop(), 0.0, 0.0, 0.0, 0.0
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
            flows = fleet.scrape(now, {"a": page}).flows
            seen += flows.prompt_tokens
            if what == "restart":
                assert flows.prompt_tokens <= total
                assert not tells_start or flows.prompt_tokens == total
    fleet_end = fleet.scrape(now + 7, {"a": counted(replace(BUSY, process_start=start), prompt_tokens=total)})
    seen += fleet_end.flows.prompt_tokens
    assert seen <= happened
    if not hidden:
        assert seen == happened
    elif tells_start:
        assert seen >= after_restart


def test_every_field_of_the_totals_becomes_a_flow() -> None:
    known = {f.name for f in fields(Flows)} | {"errors", "server_errors"}
    assert {f.name for f in fields(Totals)} <= known
