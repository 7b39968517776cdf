"""Simulate many services in steps of ten seconds by a fluid model. The module `engine` simulates single requests.

A service is a closed network of sessions. A session pauses, sends a request, waits, runs and pauses again. New sessions
arrive as a Poisson process. KV memory, max_num_seqs and the speed of prefill limit the running requests. Prefill takes
its share of the time first. The remaining time and `costs` determine the duration of a decode step (processor sharing).
A cached prefix survives a pause until other requests need its blocks. docs/benchmarks/backtest.md compares this model
with `engine` and states the error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.backtest.moments import WEIGHTS, Array, Moments
from kvpilot_cli.backtest.costs import Costs, Profile

SUBSTEP = 10.0
_FILL = 0.985
"""KV-cache usage at which no further prompt fits, as measured in the request-level simulation (`engine`)."""
_PREEMPTED = 0.3
"""Preemptions per finished request while KV memory is the limit, if prompt and answer have equal lengths.

The number was measured in the request-level simulation (`engine`).
"""


@dataclass(slots=True)
class Minute:
    """Results of one call of `Fleet.step` for each service: gauges at the end of the call, and sums over the call."""

    usage: Array
    running: Array
    waiting: Array
    capacity: Array
    preemptions: Array
    finished: Array
    lost: Array
    good: Array
    prefill_seconds: Array
    decode_seconds: Array
    step_seconds: Array
    """Mean time of a decode step in seconds."""


class Fleet:
    """State of all services. Each call of `step` advances it by `SUBSTEP * substeps` seconds."""

    def __init__(
        self, profile: Profile, moments: Sequence[Moments], dtypes: Sequence[str], timeout: float, seed: int,
        objective_ttft: float, objective_itl: float, bounds: Sequence[float],
    ) -> None:  # fmt: skip
        self.dtypes = tuple(dtypes)
        table = [profile.of(d) for d in dtypes]
        self._costs = {
            name: np.array([getattr(c, name) for c in table], dtype=float) for name in Costs.__struct_fields__
        }
        self._max_seqs, self._timeout = profile.max_num_seqs, timeout
        self._budget = profile.max_num_batched_tokens
        size = len(moments)
        self.size = size
        self._m = {
            name: np.array([getattr(m, name) for m in moments])
            for name in Moments.__slots__ if not name.endswith("points")
        }  # fmt: skip
        self._points = np.array([[getattr(m, f"{kind}_points") for m in moments] for kind in ("new", "hit", "miss")])
        self._chance = np.random.default_rng(seed)
        self._objective = objective_ttft, objective_itl
        self._log_low, self._log_step = np.log(bounds[0]), np.log(bounds[1] / bounds[0])
        self.bins = len(bounds) + 1
        self.ttft = np.zeros((size, self.bins))
        self.itl = np.zeros((size, self.bins))
        zeros = np.zeros(size)
        self.thinking, self.waiting, self.inside = zeros.copy(), zeros.copy(), zeros.copy()
        self.noise, self.rate, self.losing = zeros.copy(), zeros.copy(), zeros.copy()
        self.step_seconds = np.full(size, 0.01)
        self.hit = self._m["reusable"].copy()
        self.survival = np.full(size, 1e3)
        self.total = {name: zeros.copy() for name in ("finished", "lost", "good", "preemptions")}

    def step(self, starts: Array, ready: Array, dtype: NDArray[np.int64], substeps: int) -> Minute:
        """Advance all services. Each array has one element per service.

        Args:
            starts: new sessions per second.
            ready: ready replicas.
            dtype: index of the KV-cache dtype in `dtypes`.
            substeps: number of steps of `SUBSTEP` seconds.
        """
        costs = {name: values[dtype] for name, values in self._costs.items()}
        sums = {name: np.zeros(self.size) for name in
                ("preemptions", "finished", "lost", "good", "prefill", "decode")}  # fmt: skip
        pods = np.maximum(ready, 1.0)
        for _ in range(substeps):
            usage, wait, last = self._substep(starts, ready, pods, costs, sums)
        # Latencies change slowly, so all requests of a call get the latencies of its last substep.
        sums["good"] = self._latencies(sums["finished"], wait, *last, costs)
        for name in ("finished", "lost", "good", "preemptions"):
            self.total[name] += sums[name]
        return Minute(
            usage=usage, running=self.inside.copy(), waiting=self.waiting.copy(), capacity=costs["kv_tokens"] * ready,
            preemptions=sums["preemptions"], finished=sums["finished"], lost=sums["lost"], good=sums["good"],
            prefill_seconds=sums["prefill"], decode_seconds=sums["decode"], step_seconds=self.step_seconds.copy(),
        )  # fmt: skip

    def _substep(
        self, starts: Array, ready: Array, pods: Array, costs: dict[str, Array], sums: dict[str, Array]
    ) -> tuple[Array, Array, tuple[Array, Array, Array, Array]]:
        m, h = self._m, SUBSTEP
        normal = self._chance.standard_normal((2, self.size))
        # Count the same random number of sessions as ended pauses and as arriving requests, so that no session is lost.
        returns = np.minimum(h / m["pause"], 1.0)
        back = self.thinking * returns + np.sqrt(self.thinking * returns * (1 - returns)) * normal[0]
        back = np.clip(back, 0.0, self.thinking)
        self.thinking = self.thinking - back
        arrived = self._chance.poisson(starts * h) + back
        # Requests differ in size, so let the mean size of running requests fluctuate around the mean of all requests.
        keep = np.exp(-h / np.maximum(m["output"] * self.step_seconds, 1.0))
        self.noise = keep * self.noise + np.sqrt(1 - keep * keep) * normal[1]
        inside = np.maximum(self.inside, 1.0)
        young = self._youth()
        held = m["held"] * young * np.maximum(1 + m["held_cv"] * self.noise / np.sqrt(inside), 0.3)
        memory = np.minimum(_FILL * costs["kv_tokens"] / held, self._max_seqs)

        work, tokens = self._work(costs, young)
        chunk = np.minimum(self._budget / tokens, 1.0) * work
        full = work * np.maximum(self._budget / tokens, 1.0)
        present = self.waiting + self.inside + arrived
        # Requests leave at a rate that depends on how many run after the substep. Two iterations find both numbers.
        running = self.inside
        for _ in range(2):
            each = running / pods
            plain = costs["base"] + each * (costs["per_sequence"] + held * costs["per_kv_token"])
            # A step takes at most `_budget` prompt tokens, which limits the share of prefill even if memory is free.
            most = full / (full + plain)
            share = np.minimum(self._prefill_share(each, plain, work), most)
            stay = m["output"] * plain / (1 - share) + work
            room = np.minimum(memory, 1 + most / work * (m["output"] * (plain + full) + work)) * pods
            running = np.minimum(present / (1 + h / stay), room)
        finished = np.minimum(present, running * h / stay) * (ready > 0)
        present = present - finished
        self.inside = np.minimum(present, room)
        waiting = present - self.inside
        self.rate = np.where(waiting > 0, 0.8 * self.rate + 0.2 * finished / h, finished / h)
        rate = np.maximum(self.rate, 1e-9)
        lost = np.maximum(waiting - rate * self._timeout, 0.0)
        self.waiting = waiting - lost
        self.losing = 0.98 * self.losing + 0.02 * lost / np.maximum(lost + finished, 1e-9)
        wait = np.minimum(self.waiting / rate, self._timeout) * (self.waiting > 0)
        over = np.minimum(self._chance.poisson(finished / m["turns"]), finished)
        self.thinking = self.thinking + np.where(m["turns"] > 1, finished - over, 0.0)
        self.step_seconds = plain / (1 - share)
        self._remember(rate, held, costs, pods, young)
        binding = self.inside >= 0.98 * memory * pods
        sums["preemptions"] += binding * finished * _PREEMPTED * m["output"] / m["prompt"]
        sums["finished"] += finished
        sums["lost"] += lost * m["turns"]
        sums["prefill"] += finished * (work + plain)
        sums["decode"] += self.inside * h
        usage = np.minimum(self.inside * held / np.maximum(costs["kv_tokens"] * pods, 1.0), 1.0)
        return usage, wait, (work, chunk, plain, share)

    def _youth(self) -> Array:
        """Return a factor: the mean context length of running requests over that of a load without lost requests.

        A lost request ends its session early, so with losses fewer requests have a long context.
        """
        m = self._m
        usual = m["turns"] - 1
        goes_on = (1 - 1 / m["turns"]) * (1 - self.losing)
        age = goes_on / (1 - goes_on)
        first = np.minimum(m["first"] / m["held"], 1.0)
        return np.asarray(np.where(usual > 0.01, first + (1 - first) * age / np.maximum(usual, 0.01), 1.0))

    def _kinds(self) -> tuple[Array, Array, Array]:
        """Return three shares of the requests: first turns, later turns with a cached prefix, later turns without."""
        later = self._m["reusable"]
        return 1 - later, self.hit, np.maximum(later - self.hit, 0.0)

    def _work(self, costs: dict[str, Array], young: Array) -> tuple[Array, Array]:
        """Return the mean prefill of a request, in seconds and in tokens. `young` is the result of `_youth`."""
        m, token, pair = self._m, costs["per_prefill_token"], costs["per_prefill_pair"]
        new, hit, miss = self._kinds()
        tokens = new * m["new_tokens"] + hit * m["hit_tokens"] + miss * m["miss_tokens"] * young
        pairs = new * m["new_pairs"] + hit * m["hit_pairs"] * young + miss * m["miss_pairs"] * young**2
        return token * tokens + pair * pairs, tokens

    def _prefill_share(self, running: Array, plain: Array, work: Array) -> Array:
        """Return the share y of its time that a replica spends on prefill while it runs `running` requests.

        A request takes `output` steps of plain / (1 - y) seconds, and `work` seconds of prefill. A replica finishes x =
        y / work requests a second. By Little's law, running = x (output * plain / (1 - y) + work), a quadratic equation
        in y.
        """
        b = running + 1 + self._m["output"] * plain / work
        return np.asarray(0.5 * (b - np.sqrt(b * b - 4 * running)))

    def _remember(self, rate: Array, held: Array, costs: dict[str, Array], pods: Array, young: Array) -> None:
        """Update the share of requests that find their prefix in the cache.

        When a request finishes, its blocks enter a queue to be overwritten. If the session returns in time, its blocks
        leave the queue. Let F tokens be free, and let x requests a second free H tokens each. A prefix then survives T
        seconds, where F / (x H) is the integral over 0..T of the share of sessions that have not returned. Newton's
        method finds T from the T of the last substep (the integral is concave in T).

        Args:
            rate: finished requests per second.
            held: mean tokens of KV cache that a running request holds.
            costs: `Costs` of each service's dtype.
            pods: ready replicas, at least 1.
            young: see `_youth`.
        """
        m = self._m
        free = np.maximum(costs["kv_tokens"] * pods - self.inside * held, 0.0)
        queued = free / (rate * (m["prompt"] * young + m["output"]))
        returning, mean = 1 - 1 / m["turns"], np.maximum(m["pause"] - 1, 1e-3)
        for _ in range(3):
            away = np.exp(-np.maximum(self.survival - 1, 0.0) / mean)
            stayed = self.survival * (1 - returning) + returning * (np.minimum(self.survival, 1) + mean * (1 - away))
            slope = 1 - returning + returning * away
            self.survival = np.clip(self.survival + (queued - stayed) / slope, 0.0, 1e6)
        waited = self.waiting / rate
        kept = m["reusable"] * -np.expm1(-np.maximum(self.survival - 1 - waited, 0.0) / mean)
        self.hit = 0.7 * self.hit + 0.3 * kept

    def _latencies(
        self, finished: Array, wait: Array, work: Array, chunk: Array, plain: Array, share: Array,
        costs: dict[str, Array],
    ) -> Array:  # fmt: skip
        """Add finished requests to the TTFT and ITL histograms. Return how many met the objective.

        Args:
            finished: number of requests.
            wait: seconds that a request waits before its prefill.
            work: seconds of a request's prefill.
            chunk: seconds of the prefill in a step that has a chunk of a prompt.
            plain: seconds of a decode step without such a chunk.
            share: share of a replica's time that prefill takes, 0 to 1.
            costs: `Costs` of each service's dtype.
        """
        slow = 1 / (1 - share)
        # Let a new request wait for half a step, which is the average, and for the prefill of earlier prompts.
        before = wait + 1.5 * plain + 0.5 * share * slow * work
        kinds = np.stack(self._kinds())[:, :, None]
        own = (
            costs["per_prefill_token"][:, None] * self._points[..., 0]
            + costs["per_prefill_pair"][:, None] * self._points[..., 1]
        )
        ttft = before[:, None] + own
        count = kinds * WEIGHTS * finished[:, None]
        self._count(self.ttft, ttft, count)
        good = (count * (ttft <= self._objective[0])).sum(axis=(0, 2)) * (self.step_seconds <= self._objective[1])
        # Prompts are prefilled in chunks. Steps with a chunk take longer, so count their gaps separately.
        steps = (1 - share) / plain
        mixed = np.minimum(share / np.maximum(chunk, 1e-9) / np.maximum(steps, 1e-9), 1.0)
        tokens = finished * self._m["output"]
        gaps = np.stack([plain, plain + chunk * 0.5, plain + chunk * 1.5])
        self._count(
            self.itl, gaps[..., None], np.stack([1 - mixed, mixed * 0.5, mixed * 0.5])[..., None] * tokens[:, None]
        )
        return np.asarray(good)

    def _count(self, table: Array, seconds: Array, times: Array) -> None:
        """Add values to each service's histogram.

        Args:
            table: counts, [services, bins].
            seconds, times: values and how often each occurs, [kinds, services, points].
        """
        at = np.ceil((np.log(np.maximum(seconds, 1e-9)) - self._log_low) / self._log_step).astype(np.int64)
        at = np.clip(at, 0, self.bins - 1) + self.bins * np.arange(self.size)[:, None]
        table += np.bincount(at.ravel(), times.ravel(), table.size).reshape(table.shape)
