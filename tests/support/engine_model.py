"""A model of one vLLM engine for properties of observe: blocks, continuous batching, chunked prefill, preemption.

It does what vLLM's scheduler does to the figures on its page, and nothing else: its gauges are written once a step, all
at one instant; cached blocks count as free; the last block of a request is its own.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvpilot_operator.observe.pod_metrics import PodMetrics, Totals
from kvpilot_operator.state.histogram import Histogram

LATENCIES = (0.01, 0.1, 1.0, 10.0)
LENGTHS = (10.0, 100.0, 1000.0)


@dataclass(slots=True, eq=False)
class _Request:
    prompt: int
    output: int
    arrived: float
    shared: int
    """Whole blocks of its prompt that every such request shares."""
    held: int = 0
    """Tokens in the cache."""
    generated: int = 0
    told: bool = False
    """Whether its prompt is counted."""
    started: float = 0.0
    first: float = 0.0


class EngineModel:
    """`step` lets it work, `page` is what it says. Tokens a step are many, so that a test has few steps."""

    def __init__(
        self,
        rng: random.Random,
        *,
        blocks: int = 200,
        block_size: int = 16,
        max_seqs: int = 16,
        chunk: int = 512,
        process_start: float | None = 0.0,
    ) -> None:
        self._rng = rng
        self._blocks, self._size, self._max_seqs, self._chunk = blocks, block_size, max_seqs, chunk
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._clock = 0.0
        self.start = process_start
        self.restart(process_start)

    def restart(self, process_start: float | None) -> None:
        """The process ends, with all its requests, and a new one starts."""
        self._waiting.clear()
        self._running.clear()
        self.start = process_start
        latencies, lengths = Histogram(LATENCIES, (0,) * 5), Histogram(LENGTHS, (0,) * 4)
        self.totals = Totals(ttft=latencies, itl=latencies, generation_lengths=lengths)
        self._gauges = (0.0, 0, 0)

    def arrive(self, prompt: int, output: int, *, shared: float = 0.0) -> None:
        """A request; `shared` is the share of its prompt that all such requests have in common."""
        room = (self._blocks - 1) * self._size
        prompt = max(1, min(prompt, room // 2))
        output = max(1, min(output, room - prompt - 1))
        whole = min(int(prompt * shared), prompt - 1) // self._size
        self._waiting.append(_Request(prompt, output, self._clock, whole))

    def leave(self) -> None:
        """A client goes; its request is in no count."""
        queue = self._running or self._waiting
        if queue:
            del queue[self._rng.randrange(len(queue))]

    def step(self, seconds: float) -> None:
        """One step of the scheduler, then its gauges."""
        self._clock += seconds
        budget = self._chunk
        preempted = self.totals.preemptions
        for request in list(self._running):
            if request not in self._running:
                continue
            due = request.prompt + request.generated - request.held
            grow = min(max(due, 1), budget)
            if grow <= 0 or not self._make_room(request, grow):
                continue
            budget -= grow
            self._advance(request, grow, seconds)
        # Nobody is let in during a step that had to put somebody out.
        while self._waiting and self.totals.preemptions == preempted:
            if len(self._running) >= self._max_seqs or budget <= 0:
                break
            request = self._waiting[0]
            # Cached blocks are taken as they are; at least the last token is computed.
            cached = request.shared * self._size if any(r.shared for r in self._running) else 0
            grow = min(request.prompt + request.generated - cached, budget)
            if self._free(request, cached + grow) < 0:
                break
            self._waiting.popleft()
            request.held, request.started = cached, request.started or self._clock
            self._running.append(request)
            budget -= grow
            self._advance(request, grow, seconds)
        for request in [r for r in self._running if r.generated >= r.output]:
            self._running.remove(request)
            self._finish(request)
        self._gauges = (self._used() / (self._blocks - 1), len(self._running), len(self._waiting))

    def page(self) -> PodMetrics:
        """The page as of the last step."""
        usage, running, waiting = self._gauges
        return PodMetrics(
            usage,
            running,
            waiting,
            self._blocks * self._size,
            self._blocks,
            "auto",
            process_start=self.start,
            totals=self.totals,
        )

    def _count(self, **more: float) -> None:
        self._set({name: getattr(self.totals, name) + by for name, by in more.items()})

    def _set(self, changes: Mapping[str, Any]) -> None:
        self.totals = replace(self.totals, **changes)

    def _observe(self, name: str, value: float) -> None:
        before: Histogram = getattr(self.totals, name)
        place = sum(value > bound for bound in before.bounds)
        counts = tuple(n + (i == place) for i, n in enumerate(before.counts))
        self._set({name: Histogram(before.bounds, counts, before.total + value)})

    def _used(self) -> int:
        """Blocks that running requests hold; those that they share count once, from the moment they are filled."""
        shared = [min(request.shared, request.held // self._size) for request in self._running]
        held = sum(-(-request.held // self._size) for request in self._running)
        return max(shared, default=0) + held - sum(shared)

    def _free(self, request: _Request, held: int) -> int:
        """Blocks left if `request` ran and held that many tokens; below 0 they do not suffice."""
        before, joins = request.held, request not in self._running
        request.held = held
        if joins:
            self._running.append(request)
        left = self._blocks - 1 - self._used()
        request.held = before
        if joins:
            self._running.remove(request)
        return left

    def _make_room(self, request: _Request, grow: int) -> bool:
        while self._free(request, request.held + grow) < 0:
            victim = self._running.pop()
            victim.held = 0
            self._waiting.appendleft(victim)
            self._count(preemptions=1)
            if victim is request:
                return False
        return True

    def _advance(self, request: _Request, grow: int, seconds: float) -> None:
        request.held += grow
        if request.held < request.prompt + request.generated:
            return
        if not request.told:
            request.told, request.first = True, self._clock
            self._count(prompt_tokens=request.prompt)
            self._observe("ttft", self._clock - request.arrived)
        else:
            self._observe("itl", seconds)
        request.generated += 1
        self._count(generation_tokens=1)

    def _finish(self, request: _Request) -> None:
        self._count(
            finished=1,
            prefill_seconds=request.first - request.started,
            decode_seconds=self._clock - request.first,
        )
        self._observe("generation_lengths", request.generated)
