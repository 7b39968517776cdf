"""Steps of the demo. A step ends when its promised effect was observed, or fails with the observation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from kvpilot_demo.load import Load
from kvpilot_demo.screen import Screen
from kvpilot_demo.world import World
from kvpilot_smallmodels.processor import serves_quantized

USERS = 12
PROMPT_TOKENS = 400
OUTPUT_TOKENS = 48
GOOD, BAD = "k4v4", "int4_per_token_head"
HANGS = 900
"""Seconds until a step fails. On quiet cores a step takes at most 90 s."""


class StoryFailed(Exception):
    """Error of a step without its promised effect."""


@dataclass(slots=True)
class Record:
    """Observations for the closing panel and the end-to-end test."""

    answer: str = ""
    pressure: str = ""
    decision: str = ""
    capacity_before: int = 0
    capacity_after: int = 0
    requests: int = 0
    failed_requests: int = 0
    failures: list[str] = field(default_factory=list)
    good_probe: dict[str, Any] = field(default_factory=dict)
    bad_probe: dict[str, Any] = field(default_factory=dict)
    preflight_warning: str = ""
    denied: list[dict[str, Any]] = field(default_factory=list)
    bad_answers: str = ""
    bad_canary: dict[str, Any] = field(default_factory=dict)
    canary_had_traffic: bool = False
    final_dtype: str = ""
    events: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def capacity_ratio(self) -> float:
        """Return the ratio of both capacities in tokens, as vLLM reports them."""
        return self.capacity_after / max(self.capacity_before, 1)

    def as_json(self) -> dict[str, Any]:
        """Return everything for the test."""
        return {**asdict(self), "capacity_ratio": self.capacity_ratio}


class Story:
    """The demo's steps in a World, shown on a Screen."""

    def __init__(self, world: World, screen: Screen) -> None:
        self._world = world
        self._screen = screen
        self._load: Load | None = None
        self._told: set[str] = set()
        self.record = Record()

    async def run(self) -> Record:
        """Run all steps in order."""
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(self._watch())
            try:
                await self._step("the service becomes Ready and answers", self._becomes_ready)
                await self._step("load fills the KV cache: MemoryPressured", self._is_pressured)
                await self._step(f"the operator earns {GOOD}: canary, probe, promotion", self._earns_a_smaller_cache)
                if serves_quantized():
                    await self._step(f"a bad dtype, {BAD}, is caught before it gets traffic", self._catches_a_bad_dtype)
                else:
                    self._screen.note(
                        f"left out: a bad dtype, {BAD}, which vLLM serves on x86 only with AVX-512 or AMX"
                    )
            finally:
                watcher.cancel()
                if self._load is not None:
                    await self._load.stop(patience_seconds=0)
        return self.record

    async def _step(self, title: str, act: Callable[[], Awaitable[None]]) -> None:
        began = time.monotonic()
        with self._screen.step(title):
            await act()
        self.record.seconds[title] = round(time.monotonic() - began, 1)

    async def _becomes_ready(self) -> None:
        await self._world.apply_example()
        await self._until(lambda s: _condition(s, "Ready") == "True", "Ready")
        self.record.answer = await self._chat("In one short sentence: what is the capital of France?")
        self._screen.note(f"chat through the Service at {await self._world.service_url()}: {self.record.answer!r}")
        await self._until(lambda s: bool(_at(s, "accuracy", "baseline")), "a 16-bit baseline")

    async def _is_pressured(self) -> None:
        self._load = Load(
            await self._world.service_url(),
            self._world.model,
            users=USERS,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
        )
        await self._load.start()
        status = await self._until(lambda s: _condition(s, "MemoryPressured") == "True", "MemoryPressured")
        self.record.pressure = _message(status, "MemoryPressured")

    async def _earns_a_smaller_cache(self) -> None:
        before = await self._until(lambda s: bool(_at(s, "canary")), "a canary")
        decision = next(d for d in before["decisions"] if d["action"] == "StartCanary")
        self.record.decision = f"{decision['fromDtype']} -> {decision['toDtype']}: {decision['message']}"
        self.record.capacity_before = before["kvCache"]["capacityTokens"]
        after = await self._until(
            lambda s: (
                _at(s, "kvCache", "activeDtype") == GOOD
                and _ended(s).get("verdict") == "Passed"
                # Until the first scrape after the promotion, the status keeps the old engine's capacity.
                and _at(s, "kvCache", "capacityTokens") != self.record.capacity_before
            ),
            f"{GOOD} promoted",
        )
        self.record.good_probe = after["accuracy"]["last"]
        self.record.capacity_after = after["kvCache"]["capacityTokens"]
        # Only after the old engine has drained is it certain that the change lost no request.
        await self._world.until_pods(1, HANGS)
        await self._end_load()

    async def _catches_a_bad_dtype(self) -> None:
        await self._world.patch({"spec": {"kvCache": {"mode": "Fixed", "dtype": BAD}}})
        self._screen.note(f"kubectl patch qllm {self._world.name}: spec.kvCache = Fixed, {BAD}")
        await self._until(lambda s: _at(s, "canary", "stage") == "Probing", "a canary that is probed")
        self.record.preflight_warning = await self._world.preflight_warning(BAD)
        self._screen.note(f"preflight: {self.record.preflight_warning}")
        self.record.canary_had_traffic = await self._world.canary_has_traffic()
        status = await self._until(
            lambda s: not _at(s, "canary") and (_ended(s).get("verdict"), _ended(s).get("dtype")) == ("Failed", BAD),
            f"{BAD} rolled back",
        )
        self.record.bad_probe = status["accuracy"]["last"]
        await self._until(lambda _: bool(self._answers()), "an Event with both answers")
        self.record.bad_answers = self._answers()
        self.record.bad_canary = _ended(status)
        self.record.denied = status["kvCache"].get("denied", [])
        self.record.final_dtype = status["kvCache"]["activeDtype"]
        await self._chat("Say hello.")

    def _answers(self) -> str:
        """Return the newest Event with the answers of both dtypes; empty before it is seen."""
        said = "AnswersDiffer: "
        return next((one.removeprefix(said) for one in reversed(self.record.events) if one.startswith(said)), "")

    async def _end_load(self) -> None:
        if self._load is None:
            return
        await self._load.stop(HANGS)
        stats = self._load.stats
        self.record.requests, self.record.failed_requests = stats.ok + stats.failed, stats.failed
        self.record.failures = list(stats.failures)[:5]
        self._screen.note(f"{stats.ok} requests answered, {stats.failed} failed during the change")

    async def _chat(self, question: str) -> str:
        body = {
            "model": self._world.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 32,
            "temperature": 0,
        }
        async with httpx.AsyncClient(timeout=120) as client:
            answer = await client.post(f"{await self._world.service_url()}/v1/chat/completions", json=body)
            answer.raise_for_status()
            text: str = answer.json()["choices"][0]["message"]["content"]
            return text.strip()

    async def _until(self, seen: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        deadline = time.monotonic() + HANGS
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            service = await self._world.service()
            status = (service or {}).get("status") or {}
            if seen(status):
                return status
            await asyncio.sleep(0.5)
        conditions = "; ".join(
            f"{c['type']}={c['status']} {c['reason']}: {c.get('message', '')}" for c in status.get("conditions", [])
        )
        raise StoryFailed(f"no {what} within {HANGS} s; conditions: {conditions}; logs: {self._world.logs}")

    async def _watch(self) -> None:
        while True:
            self._screen.show(await self._world.service(), self._load.summary() if self._load else None)
            for event in await self._world.events():
                line = f"{event['reason']}: {event['message']}"
                identity = event["metadata"]["uid"]
                if identity not in self._told:
                    self._told.add(identity)
                    self.record.events.append(line)
                    self._screen.note(line)
            await asyncio.sleep(1.0)


def _ended(status: dict[str, Any]) -> dict[str, Any]:
    """Return the newest trial that ended; empty if none has."""
    return next(iter(status.get("history", ())), {})


def _at(status: dict[str, Any], *path: str) -> Any:
    here: Any = status
    for name in path:
        here = here.get(name) if isinstance(here, dict) else None
    return here


def _condition(status: dict[str, Any], kind: str) -> str | None:
    return next((c["status"] for c in status.get("conditions", []) if c["type"] == kind), None)


def _message(status: dict[str, Any], kind: str) -> str:
    return next((c.get("message", "") for c in status.get("conditions", []) if c["type"] == kind), "")
