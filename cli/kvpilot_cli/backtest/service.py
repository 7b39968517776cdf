"""Simulate a service with several engines behind a router, request by request.

A session stays with its replica to reuse the cached prefix. It moves if requests wait there and another replica has
room. A new session goes to the replica with the fewest requests. A new replica answers after `start_seconds`. Its GPU
time counts from the start until it has drained.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta

from kvpilot_cli.backtest.batch import Limits, Request
from kvpilot_cli.backtest.buckets import FINE, Tally
from kvpilot_cli.backtest.costs import Profile
from kvpilot_cli.backtest.engine import EPOCH, Engine
from kvpilot_cli.backtest.loads import Asked, Session
from kvpilot_operator.state.samples import Flows, Sample, Spread

SLICE = 1.0
"""Seconds for which engines run before the router assigns requests again."""


@dataclass(slots=True, eq=False)
class Replica:
    """One simulated replica. `engine.dtype` identifies its revision."""

    engine: Engine
    ready_at: float
    leaving: bool = False


@dataclass(slots=True)
class Outcome:
    """Results: latencies of users' requests, and the GPU time. Histograms have FINE buckets."""

    gpu_seconds: float = 0.0
    finished: int = 0
    good: int = 0
    """Number of finished requests whose TTFT and mean inter-token latency meet the objective."""
    lost: int = 0
    """Number of requests that timed out or were refused, plus the later turns of their sessions."""
    preemptions: int = 0
    flips: int = 0
    scalings: int = 0
    ttft: Tally = field(default_factory=lambda: Tally(FINE))
    itl: Tally = field(default_factory=lambda: Tally(FINE))
    latency: Tally = field(default_factory=lambda: Tally(FINE))


@dataclass(frozen=True, slots=True)
class Objective:
    """Latency limits of a good request, in seconds."""

    ttft: float = 5.0
    itl: float = 0.06


class Service:
    """Simulated service: users, router and replicas."""

    def __init__(
        self, profile: Profile, load: Asked, dtype: str, replicas: int, *, objective: Objective, start_seconds: float,
        timeout: float,
    ) -> None:  # fmt: skip
        self.profile, self.load = profile, load
        self.serving = {dtype}
        self.objective, self.start_seconds = objective, start_seconds
        self.limits = Limits(profile.max_num_seqs, profile.max_num_batched_tokens, timeout=timeout)
        self.now = 0.0
        self.outcome = Outcome()
        self.replicas: list[Replica] = []
        self._sessions: Iterator[Session] = load.sessions()
        self._next: Session | None = next(self._sessions, None)
        self._due: list[tuple[float, int, int, Session]] = []
        self._home: dict[int, Replica] = {}
        self._asked: dict[int, tuple[Session, int]] = {}
        self._count = 0
        for _ in range(replicas):
            self._start(dtype, ready_at=0.0)

    def forget(self) -> None:
        """Reset the results to zero, as at the end of the warm-up."""
        self.outcome = Outcome()
        for replica in self.replicas:
            replica.engine.on_gap = self.outcome.itl.add

    def of(self, dtype: str) -> list[Replica]:
        """Return the replicas with this dtype that are not draining."""
        return [r for r in self.replicas if r.engine.dtype == dtype and not r.leaving]

    def ready(self, dtype: str) -> list[Replica]:
        """Return the replicas with this dtype that are ready and not draining."""
        return [r for r in self.of(dtype) if r.ready_at <= self.now]

    def scale(self, dtype: str, replicas: int) -> None:
        """Start or drain replicas of a revision. The replicas that became ready last are drained first."""
        have = self.of(dtype)
        for _ in range(replicas - len(have)):
            self._start(dtype, self.now + self.start_seconds)
        for replica in sorted(have, key=lambda r: r.ready_at)[max(replicas, 0) :]:
            replica.leaving = True

    def serve(self, dtype: str) -> None:
        """Send traffic to the revision with this dtype, too."""
        self.serving.add(dtype)

    def switch(self, dtype: str) -> None:
        """Send all traffic to the revision with this dtype, and drain all other replicas."""
        self.serving = {dtype}
        for replica in self.replicas:
            if replica.engine.dtype != dtype:
                replica.leaving = True

    def advance(self, until: float) -> None:
        """Simulate users and engines up to the time `until`."""
        while self.now < until:
            end = min(self.now + SLICE, until)
            self._ask(end)
            for replica in self.replicas:
                replica.engine.advance(end)
            self.outcome.gpu_seconds += (end - self.now) * len(self.replicas) * self.profile.gpus_per_replica
            self.now = end
            for replica in self.replicas:
                if replica.engine.done:
                    self._collect(replica)
            if any(r.leaving for r in self.replicas):
                self.replicas = [r for r in self.replicas if not (r.leaving and self._empty(r.engine))]

    def scrape(self, dtype: str) -> Sample | None:
        """Return a revision's metrics, or None while no replica of it answers."""
        pages = [r.engine.scrape() for r in self.ready(dtype)]
        if not pages:
            return None
        capacity = sum(p.capacity_tokens for p in pages)
        flows = Flows.together([page.flows for page in reversed(pages)])
        return replace(
            pages[0], time=EPOCH + timedelta(seconds=self.now), pods=len(pages), flows=flows, capacity_tokens=capacity,
            usage=sum(p.usage * p.capacity_tokens for p in pages) / capacity,
            running=sum(p.running for p in pages), waiting=sum(p.waiting for p in pages),
            spread=Spread.of([(f"replica {i}", p.usage, p.waiting) for i, p in enumerate(pages)]),
        )  # fmt: skip

    def _start(self, dtype: str, ready_at: float) -> None:
        engine = Engine(self.profile.of(dtype), self.limits, dtype)
        engine.now = self.now
        engine.on_gap = self.outcome.itl.add
        self.replicas.append(Replica(engine, ready_at))

    def _empty(self, engine: Engine) -> bool:
        return not (engine.running or engine.waiting or engine.arriving)

    def _ask(self, end: float) -> None:
        while self._next is not None and self._next.start < end:
            heapq.heappush(self._due, (self._next.start, self._next.number, 0, self._next))
            self._next = next(self._sessions, None)
        while self._due and self._due[0][0] < end:
            time, number, turn, session = heapq.heappop(self._due)
            replica = self._route(number)
            prompt, output, _ = session.turns[turn]
            self._asked[self._count] = (session, turn)
            replica.engine.submit(Request(self._count, max(time, self.now), prompt, output, number))
            self._count += 1

    def _route(self, session: int) -> Replica:
        """Return the replica for a session's next request. The module's docstring has the rules."""
        home = self._home.get(session)
        if home is not None and not home.leaving and not home.engine.waiting:
            return home
        serving = [r for r in self.replicas if r.engine.dtype in self.serving and not r.leaving]
        ready = [r for r in serving if r.ready_at <= self.now] or serving
        idlest = min(ready, key=_load)
        if home is not None and not home.leaving and idlest.engine.waiting:
            return home
        self._home[session] = idlest
        return idlest

    def _collect(self, replica: Replica) -> None:
        outcome, objective = self.outcome, self.objective
        for request in replica.engine.done:
            session, turn = self._asked.pop(request.number)
            following = turn + 1
            outcome.preemptions += request.preempted
            if request.dropped:
                outcome.lost += len(session.turns) - turn
                following = len(session.turns)
            else:
                first, whole = request.first_token - request.arrival, request.finished - request.arrival
                outcome.finished += 1
                outcome.ttft.add(first)
                outcome.latency.add(whole)
                gap = (request.finished - request.first_token) / max(request.output - 1, 1)
                outcome.good += first <= objective.ttft and gap <= objective.itl
            if following < len(session.turns):
                due = request.finished + session.turns[following][2]
                heapq.heappush(self._due, (due, session.number, following, session))
            else:
                self._home.pop(session.number, None)
        replica.engine.done.clear()


def _load(replica: Replica) -> int:
    engine = replica.engine
    return len(engine.running) + len(engine.waiting) + len(engine.arriving)
