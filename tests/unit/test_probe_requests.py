"""Requests of a probe to an engine: one at a time, by priority, through a connector, and up to a full context."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from probing_bench import NAME, Bench, captured, opened, respond_empty

from kvpilot_operator.control import prober as module
from kvpilot_operator.control.prober import schedules_by_priority
from kvpilot_operator.state.decision import Measure, ProbeFailed
from kvpilot_probes import codec, in_flight, run
from kvpilot_probes.stats import Measurement
from support.probe_engine import Body, Handler, Writer, counting, engine, event, respond, stream
from support.services import manifest, spec_of


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with opened() as one:
        yield one


async def test_a_serving_engine_is_measured_one_request_at_a_time_and_a_canary_all_at_once(bench: Bench) -> None:
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))
    flying = most = looks = 0

    async def handler(path: str, body: Body, writer: Writer) -> None:
        nonlocal flying, most, looks
        if path == "/metrics":
            looks += 1
            respond(writer, b"")
            return
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.005)
        flying -= 1
        await counting(path, body, writer)

    async with engine(handler) as url:
        beside_users = await bench.ask(Measure("check/x", "p", url, "m", "fp8", NAME, serving=True))
        # Five prompts without damage suffice for a verdict. One more request gets the answer to show.
        assert (most, looks) == (1, 6)
        alone = await bench.ask(Measure("measure/x", "p", url, "m", "fp8", NAME))
        # The probe reads the size of a canary's KV pool once. Here the size is unknown.
        assert (most, looks) == (8, 7)
    for found in (beside_users, alone):
        assert isinstance(found.outcome, Measurement)
        assert found.outcome.top1_agreement_permille == 1000


async def test_a_periodic_probe_finishes_on_an_engine_whose_queue_never_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GIVE_WAY_SECONDS", 0.0)
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/metrics":
            respond(writer, b"vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_waiting 3\n")
        else:
            await counting(path, body, writer)

    async with engine(handler) as url:
        found = await bench.ask(Measure("check/x", "p", url, "m", "fp8", NAME, serving=True))
    assert isinstance(found.outcome, Measurement)
    assert found.outcome.prompts == 5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], False),
        (["--scheduling-policy=priority"], True),
        (["--scheduling-policy", "priority"], True),
        (["--scheduling_policy", "priority"], True),
        (["--scheduling-policy=fcfs"], False),
        (["--scheduling-policy=priority", "--scheduling-policy=fcfs"], False),
        (["--scheduling-policy"], False),
        (["--other", "priority"], False),
    ],
)
def test_low_priority_is_requested_only_if_the_engine_schedules_by_priority(
    arguments: list[str], expected: bool
) -> None:
    engine = spec_of(manifest(engine={"extraArgs": arguments})).engine
    assert schedules_by_priority(engine) is expected


TRANSFER = '{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}'


@pytest.mark.parametrize("serving", [True, False])
@pytest.mark.parametrize(
    ("spec", "loads", "bucket"),
    [
        ({}, True, None),
        ({"engine": {"extraArgs": ['--kv-transfer-config={"kv_connector": null}']}}, True, None),
        ({"kvCache": {"mode": "Auto", "offload": {"cpuMemoryGiB": 1}}}, True, "from-OffloadingConnector"),
        ({"engine": {"extraArgs": ["--kv-offloading-size=1"]}}, True, "from-OffloadingConnector"),
        ({"engine": {"extraArgs": [f"--kv-transfer-config={TRANSFER}"]}}, True, "from-LMCacheMPConnector"),
        ({"engine": {"extraArgs": [f"--kv-transfer-config={TRANSFER}"]}}, False, "from-LMCacheMPConnector"),
    ],
    ids=str,
)
async def test_pages_from_a_kv_connector_are_judged_on_their_own_if_the_engine_has_loaded_any(
    bench: Bench, spec: dict[str, Any], loads: bool, bucket: str | None, serving: bool
) -> None:
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))
    marked: list[int] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/metrics":
            hits = sum(marked) * loads
            respond(writer, f"vllm:kv_cache_usage_perc 0.5\nvllm:external_prefix_cache_hits_total {hits}\n".encode())
            return
        if body.get("kv_transfer_params") == {"kvpilot_from_connector": True}:
            marked.append(len(body["prompt"]))
        await counting(path, body, writer)

    async with engine(handler) as url:
        request = Measure("check/x", "p", url, "m", "fp8", NAME, serving=serving)
        found = (await bench.ask(request, spec_of(manifest(**spec)))).outcome
    assert isinstance(found, Measurement)
    assert ([one for one in found.planned if one.startswith("from-")] or [None]) == [bucket]
    judged = [one for one in found.seen if one.bucket == bucket]
    # Without loads, an engine gets one prompt, twice. Otherwise it gets prompts until the bucket has a verdict.
    assert len(marked) == (2 if bucket and not loads else 2 * len(judged))
    assert (len(judged) >= 5) is (loads and bucket is not None)


@pytest.mark.parametrize(("serving", "asked"), [(False, {"m", "sql", "chat"}), (True, {"m"})])
async def test_only_a_canary_is_asked_for_answers_of_its_adapters(bench: Bench, serving: bool, asked: set[str]) -> None:
    kept = await captured(bench)
    named = tuple(replace(one, name=f"builtin/long-context/{i}") for i, one in enumerate(kept.prompts))
    bench.cluster.keep(NAME, codec.encode(replace(kept, prompts=named)))
    seen: set[str] = set()

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/v1/completions":
            seen.add(body["model"])
        await (respond_empty(writer) if path == "/metrics" else counting(path, body, writer))

    adapters = [{"name": name, "source": f"file:///{name}"} for name in ("sql", "chat")]
    async with engine(handler) as url:
        request = Measure("check/x", "p", url, "m", "fp8", NAME, serving=serving)
        await bench.ask(request, spec_of(manifest(model={"adapters": adapters})))
    assert seen == asked


@pytest.mark.parametrize(
    ("spec", "serving", "cut"),
    [
        ({"canary": {"progressDeadlineSeconds": 86_400}}, False, False),
        ({"canary": {"progressDeadlineSeconds": 900}}, False, True),
        ({"accuracy": {"periodSeconds": 86_400}}, True, False),
        ({"accuracy": {"periodSeconds": 60}}, True, True),
    ],
    ids=str,
)
async def test_a_run_takes_half_of_the_canarys_deadline_or_the_period_at_most(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], serving: bool, cut: bool
) -> None:
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))
    now = 0.0

    async def slow(path: str, body: Body, writer: Writer) -> None:
        nonlocal now
        now += 200.0 if path == "/v1/completions" else 0.0
        await (respond_empty(writer) if path == "/metrics" else counting(path, body, writer))

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(in_flight, "TOKENS_IN_FLIGHT", 2)  # so that two prompts run at a time, as if they were long
    async with engine(slow) as url:
        found = await bench.ask(
            Measure("check/x", "p", url, "m", "fp8", NAME, serving=serving), spec_of(manifest(**spec))
        )
    assert isinstance(found.outcome, Measurement)
    assert found.outcome.cut == cut
    assert (found.outcome.prompts < 5) == cut


async def test_probes_of_an_engine_with_priorities_run_after_all_other_requests(bench: Bench) -> None:
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))
    seen: set[object] = set()

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/v1/completions":
            seen.add(body.get("priority"))
        await (respond_empty(writer) if path == "/metrics" else counting(path, body, writer))

    spec = spec_of(manifest(engine={"extraArgs": ["--scheduling-policy=priority"]}))
    async with engine(handler) as url:
        await bench.ask(Measure("check/x", "p", url, "m", "fp8", NAME, serving=True), spec)
    assert seen == {module.LOW_PRIORITY}


def context_of(seen: list[int], fails: Callable[[Writer], None] | None = None) -> Handler:
    """Return a sound engine with a context of 2,048 tokens.

    It records the length of each prompt. A prompt that fills the context is answered by `fails`.
    """

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/v1/completions":
            seen.append(len(body["prompt"]))
            if fails is not None and seen[-1] > 2000:
                fails(writer)
                return
        await (respond_empty(writer) if path == "/metrics" else counting(path, body, writer))

    return handler


@pytest.mark.parametrize("serving", [False, True])
async def test_a_canary_that_passes_fills_its_context_once_before_any_user_does(bench: Bench, serving: bool) -> None:
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))
    seen: list[int] = []
    async with engine(context_of(seen)) as url:
        found = await bench.ask(Measure("measure/x", "p", url, "m", "fp8", NAME, serving=serving))
    assert isinstance(found.outcome, Measurement)
    # A serving replica gets no such prompt, because its users would wait.
    assert [length for length in seen if length > 2000] == ([] if serving else [2040])
    assert found.outcome.planned == (("general",) if serving else ("general", "pressure"))


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (lambda writer: writer.transport.abort(), "is the engine running"),
        (lambda writer: respond(writer, b"CUDA out of memory", "500 Internal Server Error"), "CUDA out of memory"),
        (lambda writer: stream(writer, *[event("token_id:1", {"token_id:1": float("nan")})] * 8), "not numbers"),
    ],
    ids=["it dies", "it answers with an error", "its logprobs are NaN"],
)
async def test_a_canary_that_fails_only_at_a_full_context_is_reported_with_the_prompts_length(
    bench: Bench, fails: Callable[[Writer], None], words: str
) -> None:
    bench.cluster.keep(NAME, codec.encode(await captured(bench)))
    async with engine(context_of([], fails)) as url:
        found = await bench.ask(Measure("measure/x", "p", url, "m", "fp8", NAME))
    assert isinstance(found.outcome, ProbeFailed)
    assert found.outcome.reason == "EngineCrashed"
    for word in ("a prompt of 2040 tokens in its context of 2048", "spec.model.maxModelLen", words):
        assert word in found.outcome.message
