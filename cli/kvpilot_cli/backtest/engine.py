"""Simulation of one vLLM engine, step by step: continuous batching over KV blocks, like vLLM's V1 scheduler.

Each step first gives every running request its next token, in order of admission. Then it continues prefills. Last, it
admits waiting requests in order of arrival, as long as the token budget suffices and the whole prompt fits in free
blocks.

A running request that finds no free block evicts the request that was admitted last. The evicted request goes to the
head of the queue and computes its tokens again. A step that evicts admits no request.

Finished and evicted requests leave their full blocks as their session's cached prefix, which the session's next request
reuses. The oldest prefixes are overwritten first, from their ends.

The Python time for a step does not grow with the batch (see `batch`).
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from kvpilot_cli.backtest.batch import Blocks, Decoding, Limits, Request
from kvpilot_cli.backtest.buckets import ITL, LENGTHS, TTFT, Tally
from kvpilot_cli.backtest.costs import Costs
from kvpilot_operator.state.samples import Flows, Sample

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""Date and time of second 0 of a simulation."""


class Engine:
    """Simulated engine: `submit` requests in order of arrival, `advance` the clock, and `scrape` the metrics."""

    def __init__(self, costs: Costs, limits: Limits, dtype: str = "auto") -> None:
        self.costs, self.limits, self.dtype = costs, limits, dtype
        self.blocks = Blocks(costs.kv_tokens // costs.block_size)
        self.now = 0.0
        self.arriving: deque[Request] = deque()
        self.waiting: deque[Request] = deque()
        self.running: OrderedDict[int, Request] = OrderedDict()
        self.done: list[Request] = []
        self.preemptions = 0
        self.steps = 0
        self.prefilling: OrderedDict[int, Request] = OrderedDict()
        self.decoding = Decoding(costs.block_size)
        self._flows: dict[str, float] = dict.fromkeys(_COUNTS, 0.0)
        self._ttft, self._itl = Tally(TTFT), Tally(ITL)
        self._generations = Tally(LENGTHS)
        self._scraped = 0.0
        self.on_gap: Callable[[float, int], None] = lambda _seconds, _times: None
        """Callback that gets the seconds between two tokens, and how many requests had this gap."""

    def submit(self, request: Request) -> None:
        """Queue a request. Arrivals must not go back in time."""
        if self.arriving and request.arrival < self.arriving[-1].arrival:
            raise ValueError(f"arrival: {request.arrival} is before the last one; submit in order of arrival")
        self.arriving.append(request)

    def advance(self, until: float) -> None:
        """Run steps until the clock reaches `until`. The last step may end a little later."""
        while self.now < until:
            self._arrive()
            if not self.running and not self.waiting:
                self.now = min(until, self.arriving[0].arrival) if self.arriving else until
                continue
            steps = self.alike(until)
            if steps > 1:
                self._steps(steps)
            else:
                self._step()

    def scrape(self) -> Sample:
        """Return the engine's metrics. Counters cover the time since the last scrape."""
        self._drop_late()
        self._arrive()
        flows = Flows(
            seconds=self.now - self._scraped, ttft=self._ttft.take(), itl=self._itl.take(),
            generation_lengths=self._generations.take(), **self._flows,
        )  # fmt: skip
        self._flows = dict.fromkeys(_COUNTS, 0.0)
        self._scraped = self.now
        return Sample(
            time=EPOCH + timedelta(seconds=self.now), pods=1, usage=self.blocks.used / self.blocks.total,
            running=len(self.running), waiting=len(self.waiting),
            capacity_tokens=self.blocks.total * self.costs.block_size, observed_dtype=self.dtype, flows=flows,
        )  # fmt: skip

    def _arrive(self) -> None:
        while self.arriving and self.arriving[0].arrival <= self.now:
            request = self.arriving.popleft()
            if self._blocks(request.prompt + request.output - 1) > self.blocks.total:
                self._drop(request)
            else:
                self.waiting.append(request)

    def _drop(self, request: Request) -> None:
        request.dropped = True
        request.finished = self.now
        self.done.append(request)

    def _drop_late(self) -> None:
        while self.waiting and self._late(self.waiting[0]):
            self._drop(self.waiting.popleft())

    def _late(self, request: Request) -> bool:
        return request.first_token < 0 and self.now - request.arrival > self.limits.timeout

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.costs.block_size)

    def _step(self) -> None:
        evicted = self._make_room()
        decoding = len(self.decoding)
        self.blocks.take(self.decoding.needed())
        kv_tokens = self.decoding.tokens + decoding
        budget = self.limits.max_num_batched_tokens - decoding
        before = self.preemptions
        work, ready, budget = self._continue_prefills(budget)
        if not evicted and self.preemptions == before:
            more, admitted = self._admit(budget)
            work += more
            ready += admitted
        seconds = self.costs.decode_step(decoding, kv_tokens) + work
        self.now += seconds
        self.steps += 1
        self.decoding.step(1, decoding)
        self._flows["decode_seconds"] += seconds * decoding
        self._flows["prefill_seconds"] += seconds * len(self.prefilling)
        if decoding:
            self._gap(seconds, decoding)
            self._flows["generation_tokens"] += decoding
        self._finish_decodes()
        for request in ready:
            self._first_token(request)

    def _gap(self, seconds: float, times: int) -> None:
        self._itl.add(seconds, times)
        self.on_gap(seconds, times)

    def alike(self, until: float) -> int:
        """Return how many of the next steps decode the same requests: none of them arrives, ends or is evicted."""
        n = len(self.decoding)
        if self.waiting or self.prefilling or not n:
            return 1
        horizon = (min(until, self.arriving[0].arrival) if self.arriving else until) - self.now
        most = min(_ALIKE, self.decoding.until_one_ends(), self.blocks.available // n * self.costs.block_size)
        # Steps get longer as contexts grow. Assume that all take as long as the longest one, so that none ends after
        # the horizon.
        longest = self.costs.decode_step(n, self.decoding.tokens + n * most)
        return min(most, int(horizon / longest))

    def _steps(self, count: int) -> None:
        """Simulate `count` decode-only steps in one go. Every gap between tokens counts with their mean duration."""
        n = len(self.decoding)
        self.blocks.take(self.decoding.needed_for(count))
        mean = self.costs.decode_step(n, self.decoding.tokens + n * (count + 1) / 2)
        self.now += mean * count
        self.steps += count
        self.decoding.step(count, n)
        self._flows["decode_seconds"] += mean * count * n
        self._flows["generation_tokens"] += n * count
        self._gap(mean, n * count)
        self._finish_decodes()

    def _make_room(self) -> bool:
        """Evict the requests admitted last until the next step has enough blocks. Return True if any was evicted."""
        evicted = False
        while self.decoding.needed() > self.blocks.available:
            self._preempt(next(reversed(self.running.values())))
            evicted = True
        return evicted

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.computed = 0
        request.preempted += 1
        self.preemptions += 1
        self._flows["preemptions"] += 1
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        """Remove a request from the batch. Its full blocks remain as a cached prefix."""
        del self.running[request.number]
        self.prefilling.pop(request.number, None)
        if self.decoding.leave(request):
            request.last_token = self.now
        full = min(request.computed // self.costs.block_size, request.blocks) if self.limits.prefix_caching else 0
        self.blocks.give(request.blocks, self._key(request), full)
        request.blocks = 0

    def _key(self, request: Request) -> int:
        return request.session if request.session >= 0 else -2 - request.number

    def _continue_prefills(self, budget: int) -> tuple[float, list[Request], int]:
        work, ready = 0.0, []
        for request in list(self.prefilling.values()):
            if budget <= 0:
                break
            if request.number not in self.prefilling:
                continue
            tokens = min(budget, request.prompt + request.generated - request.computed)
            more = self._blocks(request.computed + tokens) - request.blocks
            while more > self.blocks.available and request.number in self.prefilling:
                self._preempt(next(reversed(self.running.values())))
            if request.number not in self.prefilling:
                break
            budget -= tokens
            work += self._compute(request, tokens, more)
            if request.computed == request.prompt + request.generated:
                ready.append(request)
        return work, [r for r in ready if r.number in self.prefilling], budget

    def _compute(self, request: Request, tokens: int, blocks: int) -> float:
        self.blocks.take(blocks)
        request.blocks += blocks
        seconds = self.costs.prefill(tokens, request.computed)
        request.computed += tokens
        return seconds

    def _admit(self, budget: int) -> tuple[float, list[Request]]:
        work, ready = 0.0, []
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            if self._late(request):
                self._drop(self.waiting.popleft())
                continue
            length = request.prompt + request.generated
            hit = min(self.blocks.kept(self._key(request)), (length - 1) // self.costs.block_size)
            if self._blocks(length) - hit > self.blocks.available - hit:
                break
            self.waiting.popleft()
            self.blocks.reuse(self._key(request), hit)
            self._flows["prefix_queries"] += length
            self._flows["prefix_hits"] += hit * self.costs.block_size
            request.blocks = hit
            request.computed = hit * self.costs.block_size
            self.running[request.number] = request
            self.prefilling[request.number] = request
            tokens = min(budget, length - request.computed)
            budget -= tokens
            work += self._compute(request, tokens, self._blocks(request.computed + tokens) - hit)
            if request.computed == length:
                ready.append(request)
        return work, ready

    def _first_token(self, request: Request) -> None:
        """Give the request the token that its last prefill chunk produces, and let it decode from the next step on."""
        del self.prefilling[request.number]
        if request.first_token < 0:
            request.first_token = self.now
            self._ttft.add(self.now - request.arrival)
            self._flows["prompt_tokens"] += request.prompt
        else:
            self._gap(self.now - request.last_token, 1)
        self._flows["generation_tokens"] += 1
        request.generated += 1
        request.last_token = self.now
        if request.generated >= request.output:
            self._finish(request)
            return
        self.decoding.add(request)

    def _finish_decodes(self) -> None:
        for request in self.decoding.ended():
            self._finish(request)

    def _finish(self, request: Request) -> None:
        self._leave(request)
        request.generated = request.output
        request.finished = self.now
        self.done.append(request)
        self._flows["finished"] += 1
        self._generations.add(request.output)


_ALIKE = 64
"""Largest number of steps simulated at once. Over so many steps, a step's duration grows by less than a percent."""
_COUNTS = (
    "preemptions", "prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits", "finished",
    "prefill_seconds", "decode_seconds",
)  # fmt: skip
