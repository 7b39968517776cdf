"""Decisions from gauges that no counter confirms, and from averages that would hide a full engine."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot_operator.api.kv_cache import Pressure
from kvpilot_operator.api.scaling import Objective
from kvpilot_operator.decide import decide
from kvpilot_operator.decide.load.workload import Workload, classify
from kvpilot_operator.decide.steps.policy import choose_step
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe.pod_metrics import MOST_RANKS, PodMetrics
from kvpilot_operator.observe.windows import SampleRetention, Windows
from kvpilot_operator.state.samples import Sample
from kvpilot_operator.state.status import Condition, KVCache, Status
from support.metrics_pages import parse_page
from support.policy_inputs import policy_input
from support.services import KEY, NOW, manifest, revision_of, running

PRESSURE = Pressure(high_percent=85, low_percent=50, waiting_per_replica=1, sustained_seconds=300)
SCRAPES = 120
Pages = Callable[[int], Mapping[str, PodMetrics]]


def engine(
    usage: float, running: int, waiting: int, done: int, rank: int = 0, *, label: str = "engine", prompt: int = 0
) -> str:
    """Return one engine's lines of a metrics page in the format of vLLM 0.32."""
    labels = f'{label}="{rank}",model_name="m"'
    return f"""\
vllm:num_requests_running{{{labels}}} {running}.0
vllm:num_requests_waiting{{{labels}}} {waiting}.0
vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} {waiting}.0
vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} 0.0
vllm:kv_cache_usage_perc{{{labels}}} {usage}
vllm:num_preemptions_total{{{labels}}} 3.0
vllm:prompt_tokens_total{{{labels}}} {800_000 + prompt}.0
vllm:generation_tokens_total{{{labels}}} {50_000 + done}.0
vllm:request_success_total{{{labels},finished_reason="stop"}} {400 + done // 300}.0
vllm:request_decode_time_seconds_sum{{{labels}}} {900 + done // 10}.0
vllm:cache_config_info{{{labels},block_size="16",cache_dtype="auto",num_gpu_blocks="4000"}} 1.0
"""


def page(*engines: str) -> PodMetrics:
    return parse_page("process_start_time_seconds 1.7e9\n" + "".join(engines))


HUNG = page(engine(0.9, 24, 15, 0))


def full(i: int) -> PodMetrics:
    """Return an engine that works, with a full cache and a queue."""
    return page(engine(0.95 + i % 3 / 100, 24, 15, 1500 * i))


def calm(i: int) -> PodMetrics:
    return page(engine(0.2 + i % 3 / 100, 4, 0, 500 * i))


def samples(pages: Pages, scrapes: int = SCRAPES) -> tuple[Sample, ...]:
    windows, start = Windows(KEY), NOW - timedelta(seconds=5 * (scrapes - 1))
    windows.retention = SampleRetention()
    for i in range(scrapes):
        windows.add("r", start + timedelta(seconds=5 * i), pages(i))
    return windows.samples()["r"]


def judged(pages: Pages, **more: object) -> Workload:
    return classify(samples(pages), PRESSURE, NOW, **more)  # type: ignore[arg-type]


def test_a_hanging_engine_with_a_full_cache_is_stalled_and_changes_nothing() -> None:
    window = samples(lambda i: {"chat-0": HUNG})
    kinds = {classify(window, PRESSURE, NOW - timedelta(seconds=5 * back)).kind for back in range(SCRAPES)}
    assert "MemoryBound" not in kinds
    verdict = classify(window, PRESSURE, NOW)
    assert verdict.kind == "EnginesStalled"
    assert "; stalled: chat-0: 24 requests run and 15 wait, and for " in verdict.message
    assert choose_step(policy_input(verdict)).chosen.action == "Stay"


def test_an_engine_that_hung_under_pressure_counts_as_stalled_afterwards() -> None:
    def pages(i: int) -> dict[str, PodMetrics]:
        return {"chat-0": full(min(i, 90))}

    window = samples(pages)
    assert classify(window, PRESSURE, NOW - timedelta(seconds=150)).kind == "MemoryBound"
    assert classify(window, PRESSURE, NOW).kind == "EnginesStalled"


@pytest.mark.parametrize("hung", [1, 2, 5])
def test_hanging_engines_do_not_hide_an_engine_under_pressure(hung: int) -> None:
    def pages(i: int) -> dict[str, PodMetrics]:
        return {f"hung-{n}": HUNG for n in range(hung)} | {"works": full(i)}

    verdict, alone = judged(pages), judged(lambda i: {"works": full(i)})
    assert verdict.kind == "MemoryBound"
    assert [one.partition(":")[0] for one in verdict.stalled] == [f"hung-{n}" for n in range(hung)]
    assert replace(verdict, stalled=()) == replace(alone, message=verdict.message)


def test_a_hanging_engine_beside_calm_ones_causes_neither_pressure_nor_a_scale_in() -> None:
    verdict = judged(lambda i: {"a": calm(i), "b": calm(i), "hung": HUNG})
    assert (verdict.kind, verdict.calm) == ("Relaxed", False)
    assert choose_step(policy_input(verdict, replicas=3, ready=3)).chosen.action == "Stay"
    assert judged(lambda i: {"a": calm(i), "b": calm(i)}).calm


def test_a_stalled_engine_is_reported_with_duration_and_requests() -> None:
    (told,) = samples(lambda i: {"chat-0": HUNG})[-1].stalled
    assert told.startswith("chat-0: 24 requests run and 15 wait, and for 595 s no token was generated")


def test_an_engine_that_works_again_is_judged_again() -> None:
    def pages(i: int) -> dict[str, PodMetrics]:
        return {"chat-0": HUNG if i < 20 else full(i)}

    assert judged(pages).kind == "MemoryBound"


def test_the_growing_queue_of_a_hanging_engine_is_not_a_surge() -> None:
    def pages(i: int) -> dict[str, PodMetrics]:
        return {"chat-0": page(engine(0.9, 24, 15 + 4 * i, 0))}

    verdict = judged(pages, objectives=(Objective("TTFT", 95, 2000),))
    assert (verdict.kind, verdict.surge) == ("EnginesStalled", None)


def test_changing_cache_use_without_progress_is_not_pressure() -> None:
    verdict = judged(lambda i: {"chat-0": page(engine(0.9 + i % 2 / 100, 24, 15, 0))})
    assert verdict.kind == "EnginesStalled"


def test_a_long_prompt_that_fills_blocks_is_not_a_stall() -> None:
    window = samples(lambda i: {"chat-0": page(engine(0.01 * i, 1, 0, 0))}, 60)
    assert {(s.pods, s.stalled) for s in window} == {(1, ())}


def test_an_idle_engine_is_not_stalled() -> None:
    verdict = judged(lambda i: {"chat-0": page(engine(0.0, 0, 0, 0))})
    assert (verdict.kind, verdict.stalled) == ("Idle", ())


def test_an_engine_with_waiting_but_no_running_requests_is_stalled() -> None:
    assert judged(lambda i: {"chat-0": page(engine(0.0, 0, 15, 0))}).kind == "EnginesStalled"


def test_a_hanging_rank_makes_its_pod_stalled_and_is_named() -> None:
    def pages(i: int) -> dict[str, PodMetrics]:
        return {"chat-0": page(engine(0.9, 24, 15, 0, 0), engine(0.3, 8, 0, 900 * i, 1))}

    verdict = judged(pages)
    assert verdict.kind == "EnginesStalled"
    assert verdict.stalled[0].startswith("chat-0: engine 0: 24 requests run")


def uneven(i: int) -> PodMetrics:
    """Return a data-parallel replica. One rank is full and has a queue, and the other one is nearly idle."""
    return page(engine(0.97, 24, 12, 1500 * i, 0), engine(0.21, 5, 0, 400 * i, 1))


def test_a_replica_is_as_full_as_its_fullest_rank() -> None:
    assert uneven(0).usage == 0.97
    assert (uneven(0).running, uneven(0).waiting, uneven(0).capacity_tokens) == (29, 12, 128_000)


def test_one_full_rank_beside_a_roomy_one_is_an_imbalance_and_changes_nothing() -> None:
    verdict = judged(lambda i: {"chat-0": uneven(i)})
    assert (verdict.kind, verdict.usage_percent) == ("Imbalanced", 97)
    assert "chat-0 engine 0 is 97% full and 12 requests wait for it" in verdict.message
    assert "while 50% of the engines are at most half as full and use is 59% on average" in verdict.message
    assert choose_step(policy_input(verdict)).chosen.action == "Stay"


@pytest.mark.parametrize("count", [2, 8])
def test_a_full_rank_is_seen_among_any_number_of_idle_ones(count: int) -> None:
    def pages(i: int) -> dict[str, PodMetrics]:
        idle = [engine(0.05, 1, 0, 100 * i, n) for n in range(1, count)]
        return {"chat-0": page(engine(0.97, 24, 12, 1500 * i, 0), *idle)}

    assert judged(pages).kind == "Imbalanced"


@pytest.mark.parametrize(
    ("full_ones", "count", "kind"), [(2, 4, "Imbalanced"), (4, 8, "Imbalanced"), (7, 8, "MemoryBound")]
)
def test_several_full_ranks_are_an_imbalance_if_an_even_load_would_leave_room(
    full_ones: int, count: int, kind: str
) -> None:
    def pages(i: int) -> dict[str, PodMetrics]:
        ranks = [engine(0.97, 24, 6, 900 * i, n) for n in range(full_ones)]
        return {"chat-0": page(*ranks, *(engine(0.1, 2, 0, 90 * i, n) for n in range(full_ones, count)))}

    assert judged(pages).kind == kind


def test_a_full_rank_beside_a_nearly_full_one_is_memory_bound() -> None:
    verdict = judged(lambda i: {"chat-0": page(engine(0.97, 24, 12, 900 * i, 0), engine(0.8, 20, 3, 900 * i, 1))})
    assert verdict.kind == "MemoryBound"


def test_a_page_with_a_series_for_each_process_is_judged_by_the_fullest_one() -> None:
    def processes(i: int) -> PodMetrics:
        rest = [engine(0.0, 0, 0, 0, pid, label="pid") for pid in range(12, 19)]
        return page(engine(0.95, 24, 12, 900 * i, 11, label="pid"), *rest)

    assert processes(0).usage == 0.95
    verdict = judged(lambda i: {"chat-0": processes(i)})
    assert verdict.kind == "Imbalanced"
    assert "chat-0 process 11 is 95% full" in verdict.message


@pytest.mark.parametrize("count", [2, 3, 6])
def test_one_full_replica_beside_replicas_with_room_is_an_imbalance(count: int) -> None:
    verdict = judged(lambda i: {"z": full(i)} | {f"idle-{n}": calm(i) for n in range(1, count)})
    assert verdict.kind == "Imbalanced"
    assert "; z is 9" in verdict.message


def test_one_full_replica_does_not_hide_requests_that_wait_for_the_others() -> None:
    def prompts(i: int) -> PodMetrics:
        return page(engine(0.3, 8, 10, 400 * i, prompt=40_000 * i))

    assert judged(lambda i: {"z": full(i), "a": prompts(i), "b": prompts(i)}).kind == "ComputeBound"


def test_an_imbalance_must_last_for_sustained_seconds() -> None:
    assert classify(samples(lambda i: {"chat-0": uneven(i)}, 20), PRESSURE, NOW).kind == "Warming"
    assert judged(lambda i: {"chat-0": uneven(i) if i % 3 else calm(i)}).kind != "Imbalanced"


def test_a_page_with_metrics_of_too_many_engines_is_refused() -> None:
    with pytest.raises(ScrapeError, match=f"more than {MOST_RANKS} engines"):
        page(*(engine(0.5, 1, 0, 0, n) for n in range(MOST_RANKS + 1)))


def test_engine_labels_that_are_not_numbers_do_not_count_as_ranks() -> None:
    text = engine(0.5, 1, 0, 0).replace('engine="0"', 'engine="\x1b[31m"')
    assert page(text, text).ranks == ()


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 50)), min_size=2, max_size=9), st.randoms())
def test_a_replicas_use_is_that_of_its_fullest_rank_in_any_order(ranks: list[tuple[float, int]], rng: object) -> None:
    one = page(*(engine(usage, 4, waiting, 0, n) for n, (usage, waiting) in enumerate(ranks)))
    assert one.usage == max(usage for usage, _ in ranks)
    assert one.waiting == sum(waiting for _, waiting in ranks)
    shuffled = list(enumerate(ranks))
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    again = page(*(engine(usage, 4, waiting, 0, n) for n, (usage, waiting) in shuffled))
    assert sorted(again.ranks, key=str) == sorted(one.ranks, key=str)


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 20)), min_size=1, max_size=4),
    st.integers(1, 3),
)
@settings(max_examples=30)
def test_an_even_load_is_never_an_imbalance(ranks: list[tuple[float, int]], pods: int) -> None:
    usage, waiting = ranks[0]

    def pages(i: int) -> dict[str, PodMetrics]:
        same = page(*(engine(usage, 4, waiting, 300 * i, n) for n in range(len(ranks))))
        return {f"chat-{pod}": same for pod in range(pods)}

    assert classify(samples(pages, 80), PRESSURE, NOW).kind != "Imbalanced"


OBJ = manifest(kvCache={"mode": "Auto"}, replicas=1)
PRESSED = Condition(
    type="MemoryPressured", status="True", reason="MemoryBound", message="", last_transition_time=NOW,
    observed_generation=1,
)  # fmt: skip


@pytest.mark.parametrize("pages", [lambda i: {"chat-0": HUNG}, lambda i: {"chat-0": uneven(i)}])
def test_no_event_reports_the_end_of_a_pressure_that_is_unknown(pages: Pages) -> None:
    before = Status(conditions=(PRESSED,), kv_cache=KVCache(usage_percent=97))
    decision = decide(running(OBJ, "auto", status=before, samples={revision_of(OBJ, "auto"): samples(pages)}))
    assert "MemoryRelaxed" not in {one.reason for one in decision.events}
    assert decision.status.kv_cache.usage_percent in (None, 97)


@pytest.mark.parametrize(
    ("pages", "pressured", "metrics"),
    [
        (lambda i: {"chat-0": HUNG}, ("Unknown", "EnginesStalled"), ("False", "EnginesStalled")),
        (lambda i: {"chat-0": uneven(i)}, ("False", "Imbalanced"), ("True", "Scraped")),
        (
            lambda i: {"chat-0": full(i), "hung": HUNG},
            ("True", "MemoryBound"),
            ("True", "EnginesStalled"),
        ),
    ],
)
def test_conditions_report_stalled_and_uneven_engines(
    pages: Pages, pressured: tuple[str, str], metrics: tuple[str, str]
) -> None:
    decision = decide(running(OBJ, "auto", samples={revision_of(OBJ, "auto"): samples(pages)}))
    found = {one.type: (one.status, one.reason) for one in decision.status.conditions}
    assert (found["MemoryPressured"], found["MetricsAvailable"]) == (pressured, metrics)
    assert (decision.status.canary is None) == (pressured[0] != "True")
