"""Run a service of two GPU engines under a load, and watch it, for gpu_faults.py."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.operator.gpu_engines import Engine, connections, requests_of
from kvpilot_demo.load import Load, Stats, Talk
from kvpilot_demo.observation import Observation, ready
from kvpilot_demo.service import DemoError
from kvpilot_demo.world import World
from kvpilot_formats.untrusted import KvpilotError
from kvpilot_localcluster.tasks import cancelled
from kvpilot_operator.api.names import ENGINE_CONTAINER
from kvpilot_operator.cluster.objects import Object, Ref

POLL_SECONDS = 0.1
REPLICAS = 2
_TALK = Talk(asked=200, turns=3, thought=0.5)
ALIVE = {"periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3}
"""Liveness probe of the engines. It reacts in a quarter of the default time, so that a fault takes only minutes."""
_CANARY = {
    "steps": [{"weightPercent": 50, "holdSeconds": 10}],
    "minRequests": 10,
    "maxTTFTP95RegressionPercent": 1000,
    "maxITLP95RegressionPercent": 1000,
    "maxThroughputRegressionPercent": 95,
    "maxErrorIncreasePercent": 30,
}
"""Canary with one short traffic step. Its limits are wide, because narrow limits need thousands of requests."""
_WRAPPER = """#!/bin/sh
# While the file exists, engines start as if nobody had asked for a dtype.
if [ -e "{flag}" ]; then
  for one; do
    shift
    case "$one" in
      --kv-cache-dtype=*) one=--kv-cache-dtype=auto ;;
      --kv-cache-dtype-skip-layers=* | --recent-tokens=*) continue ;;
    esac
    set -- "$@" "$one"
  done
fi
PATH="${{PATH#*:}}"
export PATH
exec kvpilot-serve "$@"
"""


class FaultFailed(DemoError):
    """Error for an effect of a fault that was expected but did not appear in time."""


@dataclass(frozen=True)
class Users:
    """Simulated users who send requests during the faults. Lengths are in tokens."""

    count: int = 32
    prompt: int = 1500
    output: int = 300
    talk: Talk = _TALK


@dataclass(slots=True)
class Row:
    """Observations of one fault. All times are in seconds after the fault.

    Attributes:
        done: text that says how the fault was caused in this run.
        until: event that marks the recovery of the service.
        seconds: time until this event.
        unready: time until the engine left the Kubernetes Service. None if it did not leave.
        in_flight: requests on the engine shortly before the fault, from the engine's metrics.
        connections: open connections to the engine at the fault. They belong to requests, scrapes and probes.
        failed_sent: number of failed requests by the time when they were sent: `before` the fault, `until_unready`
            (between the fault and `unready`), or `later`.
        lost: number of failed requests that kvpilot should have prevented (`Fault.lost`).
        longest_first_token: longest time that a user waited for a first token.
        seen: changes of the service, its engines and its decisions, and all Events, each with its time.
    """

    fault: str
    done: str
    until: str = ""
    seconds: float = 0.0
    unready: float | None = None
    in_flight: int = 0
    connections: int = 0
    ok: int = 0
    failed: int = 0
    failed_sent: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    failures: list[str] = field(default_factory=list)
    longest_first_token: float = 0.0
    users: dict[str, Any] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    dtype: str = ""
    state: str = ""
    error: str = ""


class WatchedLoad(Load):
    """Load that also stores when each failed request was sent."""

    lost: list[tuple[float, str]]

    async def _request(self, prompt: list[int]) -> list[int]:
        sent = time.monotonic()
        try:
            return await super()._request(prompt)
        except Exception as error:
            self.lost.append((sent, f"{type(error).__name__}: {error}"[:200]))
            raise


def manifest(example: Object) -> Object:
    """Return the demo's service with two replicas, a 16-bit cache, and shorter time limits."""
    spec: dict[str, Any] = example["spec"]
    spec["kvCache"] = {"mode": "Fixed", "dtype": "auto"}
    spec["scaling"] = {"minReplicas": REPLICAS, "maxReplicas": REPLICAS}
    spec["canary"] |= _CANARY
    spec["drain"] = {"preStopSeconds": 5, "timeoutSeconds": 15}
    spec["engine"]["podTemplate"] = {"spec": {"containers": [{"name": ENGINE_CONTAINER, "livenessProbe": ALIVE}]}}
    return example


def wrapped(table: Path, folder: Path) -> tuple[Path, Path]:
    """Write an image table whose engines ignore the requested dtype while a flag file exists.

    Return the paths of the table and of the flag file.
    """
    programs, flag = folder / "wrapper", folder / "ignore-dtype"
    programs.mkdir(parents=True)
    (programs / "kvpilot-serve").write_text(_WRAPPER.format(flag=flag))
    (programs / "kvpilot-serve").chmod(0o755)
    images = yaml.safe_load(table.read_text())
    for image in images["images"]:
        if image["entrypoint"] == ["kvpilot-serve"]:
            image["path"] = [str(programs), *image.get("path", ())]
    (folder / "images.yaml").write_text(yaml.safe_dump(images))
    return folder / "images.yaml", flag


class Bench:
    """Service under load, with the actions that faults need. A fault stores its observations in `row`.

    Attributes:
        now: newest observation of the service.
        flag: file that makes new engines ignore the requested dtype.
    """

    def __init__(self, world: World, users: Users, flag: Path) -> None:
        self.world, self.flag = world, flag
        self.now = Observation()
        self.row = Row("", "")
        self._users = users
        self._struck, self._phase = time.monotonic(), Stats()
        self._known: dict[str, str] = {}
        self._events: set[str] = set()
        self._load: WatchedLoad | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Create the service, wait for its engines, and start the users."""
        await self.world.apply_example()
        self._watcher = asyncio.create_task(self._watch())
        await self.until(lambda o: self.whole() and o.true("Ready"), f"{REPLICAS} engines", 400)
        u = self._users
        url = await self.world.url()
        self._load = WatchedLoad(
            url, self.world.model, users=u.count, prompt_tokens=u.prompt, output_tokens=u.output, talk=u.talk
        )
        self._load.lost = []
        await self._load.start()

    async def stop(self) -> None:
        """Stop the simulated users and the watch of the service."""
        if self._watcher is not None:
            await cancelled(self._watcher)
        if self._load is not None:
            await self._load.stop(patience_seconds=0)

    async def begin(self, row: Row) -> None:
        """Wait until no canary runs and users get answers. Then start to count the requests of this fault's row."""
        self.row = row
        await self.until(lambda o: self.whole() and not o.at("canary"), "a calm service", 120)
        load = self.load
        phase = load.phase()
        await self.until(lambda _: phase.ok >= self._users.count, "answers before the fault", 60)
        load.lost.clear()
        row.seen.clear()
        self._phase = load.phase()
        self._struck = time.monotonic()

    def end(self) -> None:
        """Write the counts since the fault to the row: requests, failures, latencies, and the service's state."""
        row, load, phase = self.row, self.load, self._phase
        unready = self._struck + (row.unready if row.unready is not None else 0.0)
        row.ok, row.failed, row.users = phase.ok, phase.failed, phase.percentiles()
        row.longest_first_token = round(max(phase.first_token, default=0.0), 2)
        sent = {"before": 0, "until_unready": 0, "later": 0}
        for at, _ in load.lost:
            sent["before" if at <= self._struck else "until_unready" if at <= unready else "later"] += 1
        row.failed_sent = sent
        row.failures = sorted({text for _, text in load.lost})[:5]
        row.dtype = str(self.now.at("kvCache", "activeDtype"))
        ready_ = self.now.condition("Ready")
        row.state = f"{self.now.summary}; Ready={ready_.get('status')}"
        if denied := self.now.at("kvCache", "denied"):
            row.state += f"; denied {', '.join(one['dtype'] for one in denied)}"

    @property
    def load(self) -> WatchedLoad:
        """The load of the simulated users, once it has started."""
        if self._load is None:
            raise FaultFailed("the users have not started: call start()")
        return self._load

    def engines(self) -> list[Engine]:
        """Return the ready engines, the oldest first."""
        pods = sorted(filter(ready, self.now.pods), key=lambda pod: pod["metadata"]["creationTimestamp"])
        folder = self.world.folder / "node" / "pods"
        return [
            Engine(pod["metadata"]["name"], pod["status"]["podIP"], _restarts(pod), folder / pod["metadata"]["uid"])
            for pod in pods
        ]

    def whole(self) -> bool:
        """Return True if exactly `REPLICAS` engines exist, and all of them are ready."""
        return len(self.now.pods) == REPLICAS and len(self.engines()) == REPLICAS

    def stayed(self, engine: Engine) -> bool:
        """Return True if this engine is ready and still runs the same process."""
        return any((one.name, one.restarts) == (engine.name, engine.restarts) for one in self.engines())

    async def busy(self) -> Engine:
        """Return a ready engine with at least two requests, and store their number in the row."""
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            for engine in self.engines():
                self.row.in_flight = await requests_of(engine)
                if self.row.in_flight > 1:
                    return engine
            await asyncio.sleep(POLL_SECONDS)
        raise FaultFailed("no engine has requests: are the users there?")

    def strike(self, engine: Engine | None = None) -> None:
        """Store the time of the fault, and the number of connections to the engine that it will hit."""
        self.row.connections = connections(engine.address) if engine is not None else 0
        self._struck = time.monotonic()

    def passed(self) -> float:
        """Return the seconds since the fault."""
        return round(time.monotonic() - self._struck, 1)

    async def left(self, engine: Engine, seconds: float) -> None:
        """Wait until an engine is not ready, is replaced or has restarted. Store when in the fault's row."""
        await self.until(lambda _: not self.stayed(engine), f"{engine.name} leaves the Service", seconds)
        self.row.unready = self.passed()

    async def recovered(self, engine: Engine, seconds: float) -> None:
        """Wait until two engines are ready again, none of them with the process that the fault hit."""
        await self.until(lambda _: self.whole() and not self.stayed(engine), "both engines are ready again", seconds)
        self.row.until, self.row.seconds = "both engines are ready again", self.passed()

    async def until(self, seen: Callable[[Observation], bool], what: str, seconds: float) -> None:
        """Wait until `seen` returns True for the newest observation. `what` describes the condition for messages.

        Raises:
            FaultFailed: the condition was not met within `seconds`.
        """
        ends = time.monotonic() + seconds
        while not seen(self.now):
            if time.monotonic() > ends:
                raise FaultFailed(f"waited {seconds:.0f} s for: {what}; {self.now.summary}")
            await asyncio.sleep(POLL_SECONDS)

    async def _watch(self) -> None:
        while True:
            # If a read fails, the next turn of the loop reads again.
            with contextlib.suppress(KvpilotError):
                service = await self.world.service()
                self.now = Observation((service or {}).get("status") or {}, await self.world.pods())
                self._compare(_facts(self.now))
                for event in await self.world.events():
                    if event["metadata"]["uid"] not in self._events:
                        self._events.add(event["metadata"]["uid"])
                        self.note(f"Event {event['reason']}: {event['message'][:200]}")
            await asyncio.sleep(POLL_SECONDS)

    def _compare(self, facts: dict[str, str]) -> None:
        for name, value in facts.items():
            if self._known.get(name) != value:
                self.note(f"{name} {value}")
        for name in self._known.keys() - facts.keys():
            self.note(f"{name} is gone")
        self._known = facts

    def note(self, text: str) -> None:
        """Add a line of text, with the time since the fault, to the row's `seen`."""
        self.row.seen.append(f"{self.passed():.1f} s: {text}")

    async def delete(self, engine: Engine) -> None:
        """Delete an engine's pod."""
        await self.world.cluster.delete(Ref("v1", "Pod", self.world.namespace, engine.name))


def _restarts(pod: Object) -> int:
    return sum(one.get("restartCount", 0) for one in pod["status"].get("containerStatuses", ()))


def _facts(seen: Observation) -> dict[str, str]:
    """Return the facts whose changes are stored: engines, conditions, the canary, and the newest decision."""
    found = {}
    for pod in seen.pods:
        leaving = ", leaving" if pod["metadata"].get("deletionTimestamp") else ""
        up = "ready" if ready(pod) else "not ready"
        found[f"engine {pod['metadata']['name']}"] = f"{up}, {_restarts(pod)} restarts{leaving}"
    for one in seen.status.get("conditions", ()):
        found[f"condition {one['type']}"] = f"{one['status']} {one['reason']}"
    if canary := seen.at("canary"):
        found["canary"] = f"{canary['dtype']} {canary['stage']}: {canary.get('message', '')[:200]}"
    if decided := seen.at("decisions"):
        found["decision"] = f"{decided[0]['action']} {decided[0]['reason']}: {decided[0]['message'][:200]}"
    return found
