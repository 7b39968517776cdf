"""Steps of the demo. A step ends when it observes its expected effect, and fails if there is no more progress.

The demo on GPUs has more steps. Its load continues between the steps, grows, and stops before the last step.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from kvpilot_demo.load import ONCE, Load, LoadError, Stats, Talk
from kvpilot_demo.observation import STANDSTILL, Observation, Patience
from kvpilot_demo.screen import Screen
from kvpilot_demo.service import DemoError, DemoService
from kvpilot_formats.untrusted import KvpilotError
from kvpilot_localcluster.tasks import cancelled

GOOD, BAD = "k4v4", "k2v2"
# The API allows two bits without the recent window. The engine looks healthy, but a small model answers badly.
MISTAKE = {"mode": "Fixed", "dtype": BAD, "recentTokens": 0}
# Use mode Fixed: in mode Auto, kvpilot may return to 16 bits while the service has no load.
UNDONE = {"mode": "Fixed", "dtype": GOOD, "recentTokens": None}


@dataclass(frozen=True)
class Size:
    """Load of a story. Lengths are in tokens.

    Attributes:
        users: number of users that fill the 16-bit cache.
        grown: number of users that one engine cannot serve, whatever its dtype. With 0, the story has no steps of a
            growing load.
        rounds: number of answers for each user in a step that only measures.
        patient: True if a wait may take any time as long as there is progress.
        standstill: most seconds without progress; unless `patient`, most seconds of a whole wait.
    """

    users: int = 12
    prompt_tokens: int = 400
    output_tokens: int = 48
    talk: Talk = ONCE
    grown: int = 0
    rounds: int = 3
    patient: bool = True
    standstill: float = STANDSTILL


# Keep prompts short and answers long. Otherwise the limit would be the tokens of an engine's step, not its KV memory.
ON_GPUS = Size(
    24, 6000, 500, Talk(asked=200, turns=2, thought=0.5), grown=96, rounds=8, patient=False, standstill=300.0
)
IMAGINED = Size(12, 400, 48, Talk(asked=20, turns=4, thought=0.5), grown=48)
"""Load for the GPU story in tests without GPUs: engines run on CPUs, and the node only claims to have GPUs."""


class StoryFailed(DemoError):
    """Error for a step whose expected effect did not appear.

    Attributes:
        step: the step's title.
        log: the log to read.
    """

    def __init__(self, step: str, why: str, log: str) -> None:
        super().__init__(why)
        self.step, self.log = step, log


@dataclass(slots=True)
class Record:
    """Observations of all steps, for the summary and the end-to-end test."""

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
    denied: list[dict[str, Any]] = field(default_factory=list)
    bad_answers: str = ""
    bad_canary: dict[str, Any] = field(default_factory=dict)
    canary_had_traffic: bool = False
    final_dtype: str = ""
    final_answer: str = ""
    events: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage of each canary."""
    trial_seconds: dict[str, float] = field(default_factory=dict)
    """Pod-seconds of additional pods in each trial, by dtype. With one GPU a pod, they are GPU-seconds."""
    users: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Counts and latencies that the simulated users saw in each step."""
    failure: str = ""
    """Step that failed, and why; empty after a success."""

    @property
    def capacity_ratio(self) -> float:
        """Return the capacity in tokens after the change of dtype over that before it, both reported by vLLM."""
        return self.capacity_after / max(self.capacity_before, 1)

    def as_json(self) -> dict[str, Any]:
        """Return all observations as JSON values."""
        return {**asdict(self), "capacity_ratio": self.capacity_ratio}


class Story:
    """Run of the demo's steps with one service, shown on a Screen.

    Attributes:
        beside: work to do while the first engine starts.
    """

    def __init__(
        self, world: DemoService, screen: Screen, size: Size | None = None, save: Callable[[Record], None] | None = None
    ) -> None:
        self._world = world
        self._screen = screen
        self._size = size or Size()
        self._save = save or (lambda _: None)
        self._load: Load | None = None
        self._phase = Stats()
        self._replicas = 1
        self._seen, self._trial = 0.0, ""
        self.beside: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._told: set[str] = set()
        self._title = ""
        self.record = Record()

    async def run(self) -> Record:
        """Run all steps of the demo in order, and return what was observed."""
        watcher = asyncio.create_task(self._watch())
        try:
            await self._step("a model serves with a 16-bit KV cache", self._becomes_ready)
            await self._step(f"{self._size.users} users fill the KV cache", self._is_pressured)
            await self._step(f"kvpilot tries {GOOD}, checks its answers and switches", self._earns)
            if self._size.grown:
                await self._step(f"the same users on {GOOD}", self._goes_on)
                await self._step(f"{self._size.grown} users; kvpilot adds a replica", self._grows)
                await self._step("the same users on two replicas", self._goes_on)
            else:
                await self._end_load()
            await self._step(f"you ask for {BAD} without its recent window; kvpilot refuses", self._catches)
            if self._size.grown:
                await self._step("the users leave; kvpilot takes the replica back", self._shrinks)
        except BaseException as error:
            # A cancellation, for example at a time limit, is a failure, too, so catch BaseException.
            self.record.failure = f"{self._title}: {type(error).__name__}: {error}"
            raise
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
            if self._load is not None:
                await self._load.stop(patience_seconds=0)
            self._save(self.record)
        return self.record

    async def _step(self, title: str, act: Callable[[], Awaitable[None]]) -> None:
        began, self._title = time.monotonic(), title
        if self._load is not None:
            self._phase = self._load.phase()
        with self._screen.step(title):
            try:
                await act()
            except StoryFailed:
                raise
            except (DemoError, KvpilotError, LoadError, httpx.HTTPError, OSError) as error:
                raise StoryFailed(title, f"{type(error).__name__}: {error}", self._world.logs) from error
            finally:
                self.record.seconds[title] = round(time.monotonic() - began, 1)
                self._count(title)

    def _count(self, title: str) -> None:
        """Add the requests of a step to the record, and save it."""
        if self._load is not None:
            stats = self._load.stats
            self.record.requests, self.record.failed_requests = stats.ok + stats.failed, stats.failed
            self.record.failures = list(stats.failures)[:5]
            if self._phase.ok or self._phase.failed:
                self.record.users[title] = self._phase.percentiles()
        self._save(self.record)

    async def _becomes_ready(self) -> None:
        await self._world.apply_example()
        beside = asyncio.create_task(self.beside()) if self.beside is not None else None
        try:
            await self._until(lambda o: o.true("Ready"), "the first engine")
            if beside is not None:
                await beside
        finally:
            if beside is not None:
                await cancelled(beside)
        self.record.answer = await self._chat("In one short sentence: what is the capital of France?")
        self._screen.note(f"You asked for the capital of France. The model answered: {self.record.answer}")
        await self._until(lambda o: bool(o.at("accuracy", "baseline")), "16-bit answers to compare with")

    async def _is_pressured(self) -> None:
        self._load = Load(
            await self._world.url(),
            self._world.model,
            users=self._size.users,
            prompt_tokens=self._size.prompt_tokens,
            output_tokens=self._size.output_tokens,
            talk=self._size.talk,
        )
        self._phase = self._load.phase()
        await self._load.start()
        seen = await self._until(lambda o: o.true("MemoryPressured"), "a full KV cache, for 15 s")
        self.record.pressure = seen.condition("MemoryPressured").get("message", "")

    async def _earns(self) -> None:
        before = await self._until(lambda o: bool(o.at("canary")), "kvpilot's decision")
        decision = next(d for d in before.status["decisions"] if d["action"] == "StartCanary")
        self.record.decision = f"{decision['fromDtype']} -> {decision['toDtype']}: {decision['message']}"
        self.record.capacity_before = before.status["kvCache"]["capacityTokens"]
        after = await self._until(
            lambda o: (
                o.at("kvCache", "activeDtype") == GOOD
                and o.ended(GOOD, "Passed")
                # The status still has the old engine's capacity until the first scrape after the promotion.
                and o.at("kvCache", "capacityTokens") != self.record.capacity_before
            ),
            f"an engine with {GOOD}, its probe and the switch",
        )
        self.record.good_probe = after.status["accuracy"]["last"]
        self.record.capacity_after = after.status["kvCache"]["capacityTokens"]
        # Wait until the old engine has drained. Only then is it certain that no request was lost.
        await self._until(lambda o: len(o.pods) == 1, "the last requests of the old engine")

    async def _goes_on(self) -> None:
        enough = self._size.rounds * self._size.users
        await self._until(lambda _: self._phase.ok >= enough, f"{enough} answers")

    async def _grows(self) -> None:
        self._replicas = 2
        await self._world.patch({"spec": {"scaling": {"maxReplicas": 2}}})
        self._screen.note(f"You set spec.scaling.maxReplicas to 2, and {self._size.grown} users come")
        if self._load is not None:
            self._load.set_users(self._size.grown)
        await self._until(
            lambda o: o.at("scaling", "replicas") == 2 or len(o.pods) == 2, "kvpilot's decision to scale out"
        )
        await self._until(lambda o: o.at("readyReplicas") == 2 and len(o.pods) == 2, "the second engine")

    async def _shrinks(self) -> None:
        await self._end_load()
        await self._until(lambda o: len(o.pods) == 1, "a calm time, and the end of the second engine")

    async def _catches(self) -> None:
        self._screen.note(f"You set spec.kvCache to {BAD} with recentTokens 0")
        await self._world.patch({"spec": {"kvCache": MISTAKE}})
        await self._until(lambda o: o.at("canary", "stage") == "Probing", f"an engine with {BAD}")
        self.record.canary_had_traffic = await self._world.canary_has_traffic()
        seen = await self._until(lambda o: o.ended(BAD, "Failed"), f"the answers of {BAD}")
        self.record.bad_probe = seen.status["accuracy"]["last"]
        self.record.bad_canary = seen.trial
        self.record.denied = seen.status["kvCache"].get("denied", [])
        await self._world.patch({"spec": {"kvCache": UNDONE}})
        self._screen.note(f"You set spec.kvCache to {GOOD} with its recent window. Nothing has to restart.")
        await self._until(lambda _: bool(self._answers()), "an Event with both answers")
        self.record.bad_answers = self._answers()
        last = await self._until(
            lambda o: not o.at("canary") and len(o.pods) == self._replicas, "the end of the rejected engine"
        )
        self.record.final_dtype = last.status["kvCache"]["activeDtype"]
        self.record.final_answer = await self._chat("Say hello.")

    def _answers(self) -> str:
        """Return the newest Event that quotes the answers of both dtypes; empty if there was none."""
        said = "AnswersDiffer: "
        return next((one.removeprefix(said) for one in reversed(self.record.events) if one.startswith(said)), "")

    async def _end_load(self) -> None:
        if self._load is None:
            return
        await self._load.stop(STANDSTILL)
        self._count(self._title)
        stats = self._load.stats
        self._screen.note(f"{stats.ok} requests were answered during the change, {stats.failed} failed")

    async def _chat(self, question: str) -> str:
        body = {
            "model": self._world.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 32,
            "temperature": 0,
        }
        async with httpx.AsyncClient(timeout=STANDSTILL, trust_env=False) as client:
            answer = await client.post(f"{await self._world.url()}/v1/chat/completions", json=body)
            answer.raise_for_status()
            text: str = answer.json()["choices"][0]["message"]["content"]
            return text.strip()

    async def _until(self, seen: Callable[[Observation], bool], what: str) -> Observation:
        """Observe the service until `seen` is true, and return that observation. The screen shows `what` as awaited.

        Raises:
            StoryFailed: there was no progress for `standstill` seconds, or the whole wait took longer (see
                `Size.patient`).
        """
        patience = Patience(self._size.standstill)
        while True:
            found = await self._world.observe()
            self._measure(found)
            if seen(found):
                return found
            self._screen.waits_for(what, found.summary)
            answered = self._load.stats.ok + self._load.stats.failed if self._load else 0
            # GPUs are expensive, so on GPUs each wait has a limit even if there is progress.
            if patience.ended((found.sign, answered) if self._size.patient else what, time.monotonic()):
                said = "; ".join(f"{c['type']}={c['status']} {c['reason']}" for c in found.status.get("conditions", ()))
                still = "and nothing has moved for" if self._size.patient else "for more than"
                why = f"waited for {what}, {still} {self._size.standstill:.0f} s ({said or 'no status'})"
                raise StoryFailed(self._title, why, self._world.logs)
            await asyncio.sleep(0.5)

    def _measure(self, found: Observation) -> None:
        """Add the time since the last observation to the canary's stage, and its pod-seconds to the trial."""
        now, record, canary = time.monotonic(), self.record, found.at("canary")
        passed, self._seen = now - self._seen if self._seen else 0.0, now
        if canary:
            self._trial, stage = canary["dtype"], f"{canary['dtype']} {canary['stage']}"
            record.stages[stage] = round(record.stages.get(stage, 0.0) + passed, 1)
        if self._trial and (beside := len(found.pods) - self._replicas) > 0:
            cost = record.trial_seconds.get(self._trial, 0.0) + passed * beside
            record.trial_seconds[self._trial] = round(cost, 1)

    async def _watch(self) -> None:
        while True:
            # If the cluster cannot be read, the running step reports the error. Here, just try again.
            with contextlib.suppress(KvpilotError):
                await self._look()
            await asyncio.sleep(1.0)

    async def _look(self) -> None:
        service = await self._world.service()
        self._screen.show(service, self._load.stats if self._load else None)
        for event in await self._world.events():
            self._tell(event["metadata"]["uid"], event["reason"], event["message"])
        if canary := ((service or {}).get("status") or {}).get("canary"):
            self._tell(canary.get("message", ""), canary["stage"], canary.get("message", ""))

    def _tell(self, identity: str, reason: str, message: str) -> None:
        """Show and record an Event or a canary's message, once."""
        if identity not in self._told:
            self._told.add(identity)
            self.record.events.append(f"{reason}: {message}")
            self._screen.event(reason, message)
