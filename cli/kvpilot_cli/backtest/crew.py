"""The pilots of a fleet. A pilot is asked only if its answer may be another one than Stay.

`candidates` computes a condition that is necessary for every step, for all services at once, with the thresholds of the
decide code or wider ones. So every other service would get the decision Stay, and an old pressure would end. A test
compares such a run with one that asks every pilot every minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from kvpilot_cli.backtest.engine import EPOCH
from kvpilot_cli.backtest.interval import Minute
from kvpilot_cli.backtest.loads import STEP
from kvpilot_cli.backtest.moments import Array, Moments
from kvpilot_cli.backtest.pilot import Pilot
from kvpilot_operator.decide.load.saturation import SHARE
from kvpilot_operator.decide.steps.capacity import gain, smaller
from kvpilot_operator.decide.steps.policy import PolicyDecision
from kvpilot_operator.decide.steps.policy_input import CLIMB_DWELLS
from kvpilot_operator.state.samples import Flows, Sample

Bools = NDArray[np.bool_]
_SLACK = 1e-6
_KEPT = ("usage", "running", "waiting", "capacity", "preemptions", "finished", "prefill_seconds", "decode_seconds")


class Crew:
    """All pilots of a fleet, and the last minutes of its metrics."""

    def __init__(self, pilots: Sequence[Pilot], moments: Sequence[Moments], *, ask_all: bool = False) -> None:
        self.pilots = list(pilots)
        self.asked = 0
        self._ask_all = ask_all
        spec = pilots[0].spec
        self._spec = spec
        size = len(self.pilots)
        longest = max(spec.kv_cache.pressure.sustained_seconds, spec.scaling.scale_down_stabilization_seconds)
        self._depth = int(longest // STEP) + 1
        self._rings = {name: np.zeros((self._depth, size)) for name in (*_KEPT, "pods")}
        self._built: dict[int, dict[int, Sample]] = {}
        self._minute = -1
        self._since = np.zeros(size, dtype=np.int64)  # first minute with a sample of the serving revision
        self._grown = np.zeros(size, dtype=np.int64)
        self._prompt = np.array([m.prompt for m in moments])
        self._output = np.array([m.output for m in moments])
        self._bound = np.zeros(size, dtype=bool)
        self._changed = np.full(size, -np.inf)
        self._flipped = np.full(size, -np.inf)
        # Requests per second of one replica. Above this rate, the pilot keeps its replicas (see `_limit`).
        self._limits = np.full(size, np.inf)
        # Services whose last queue was caused by memory: a smaller dtype may replace a replica there.
        self._memory = np.zeros(size, dtype=bool)
        self._rise = np.array([self._gain_up(p.dtype) for p in self.pilots])

    def take(self, minute: Minute, pods: Array) -> None:
        """Take in a scrape of every service."""
        self._minute += 1
        row = self._minute % self._depth
        before = self._rings["pods"][(self._minute - 1) % self._depth]
        self._grown = np.where(pods > before, self._minute, self._grown)
        for name in _KEPT:
            self._rings[name][row] = getattr(minute, name)
        self._rings["pods"][row] = pods

    def flipped(self, i: int, dtype: str) -> None:
        """Note that a roll is done. Samples of the new revision begin with the next scrape."""
        self.pilots[i].dtype = dtype
        self.pilots[i].dtype_changed = self._now()
        self._flipped[i] = self._minute * STEP
        self._since[i] = self._minute + 1
        self._rise[i] = self._gain_up(dtype)
        self._learn(i)

    def scaled(self, i: int) -> None:
        """Record that the number of replicas has changed."""
        self.pilots[i].replicas_changed = self._now()
        self._changed[i] = self._minute * STEP

    def judge(self, asked: Array, ready: Array, busy: Bools) -> list[tuple[int, PolicyDecision]]:
        """Return this minute's decisions that are not Stay."""
        chosen = np.ones(len(self.pilots), dtype=bool) if self._ask_all else self.candidates(asked, ready, busy)
        for i in np.flatnonzero(self._bound & ~chosen):
            self.pilots[i].was_bound = self._bound[i] = False
        decisions = []
        now = self._now()
        for i in np.flatnonzero(chosen):
            pilot = self.pilots[i]
            decision, _ = pilot.rule(
                self._samples(int(i)), now, int(asked[i]), int(ready[i]),
                "a canary is in flight" if busy[i] else None,
            )  # fmt: skip
            self.asked += 1
            self._bound[i] = pilot.was_bound
            self._learn(int(i))
            if decision.chosen.action != "Stay":
                decisions.append((int(i), decision))
        return decisions

    def candidates(self, asked: Array, ready: Array, busy: Bools) -> Bools:
        """Return the services that may need a step other than Stay, or a note of their pressure."""
        spec, pressure = self._spec, self._spec.kv_cache.pressure
        window = self._within(pressure.sustained_seconds, self._since)
        calm = self._within(spec.scaling.scale_down_stabilization_seconds, self._since)
        # A window restarts when a replica starts, so use the later of both times.
        grown = self._within(pressure.sustained_seconds, np.maximum(self._since, self._grown))
        starved = self._starved(window) | self._starved(grown)
        usage = np.minimum(self._mean("usage", window), self._mean("usage", grown))
        peak = (self._rings["usage"] * self._rings["pods"] * calm).max(axis=0)
        each = self._rings["waiting"] / np.maximum(self._rings["pods"], 1.0) * calm
        quiet = each.sum(axis=0) <= (0.5 * pressure.waiting_per_replica + _SLACK) * np.maximum(calm.sum(axis=0), 1)
        rates = self._rate(window), self._rate(grown)
        each, most = np.minimum(*rates), np.maximum(*rates)
        now, least = self._minute * STEP, max(1, spec.scaling.min_replicas)
        margin = (pressure.low_percent + pressure.high_percent) // 2
        left = np.maximum(asked - 1, 1)
        fewer = (asked > least) & (ready >= asked) & (100 * peak / left <= margin + _SLACK)
        # A rate at which requests queued once keeps a replica, until a replica is calm at a higher rate.
        allowed = each / np.maximum(np.minimum(asked, ready) - 1, 1) <= self._limits * (1 + _SLACK)
        fewer &= allowed | (most / self._pods() >= self._limits / SHARE * (1 - _SLACK))
        fewer &= now >= self._changed + pressure.sustained_seconds
        larger = (
            (asked <= least)
            & (self._rise > 0)
            & (now >= self._flipped + CLIMB_DWELLS * spec.kv_cache.min_dwell_seconds)
        )
        larger &= 100 * peak / np.maximum(np.maximum(asked, 1) * self._rise, _SLACK) <= pressure.low_percent + _SLACK
        smaller_dtype = (asked > least) & self._memory
        relaxed = (usage * 100 < pressure.low_percent + _SLACK) & quiet & (fewer | larger | smaller_dtype) & ~busy
        return np.asarray(starved | relaxed)

    def _starved(self, window: Bools) -> Bools:
        pressure, pods = self._spec.kv_cache.pressure, self._pods()
        queue = self._mean("waiting", window) >= pressure.waiting_per_replica * pods * (1 - _SLACK)
        preempted = (self._rings["preemptions"] * window).sum(axis=0) * 60 / self._pod_seconds(window)
        return np.asarray(queue | (preempted >= pressure.preemptions_per_minute * (1 - _SLACK)))

    def _rate(self, window: Bools) -> Array:
        """Return the requests that all replicas finish in a second."""
        return np.asarray((self._rings["finished"] * window).sum(axis=0) / self._pod_seconds(window) * self._pods())

    def _mean(self, name: str, window: Bools) -> Array:
        return np.asarray((self._rings[name] * window).sum(axis=0) / np.maximum(window.sum(axis=0), 1))

    def _pod_seconds(self, window: Bools) -> Array:
        return np.asarray(STEP * np.maximum((self._rings["pods"] * window).sum(axis=0), 1.0))

    def _pods(self) -> Array:
        return np.asarray(np.maximum(self._rings["pods"][self._minute % self._depth], 1.0))

    def _within(self, seconds: int, since: NDArray[np.int64]) -> Bools:
        """Return a mask (depth, services) of the ring's samples in a window."""
        rows = np.arange(self._depth)
        age = (self._minute - rows) % self._depth
        taken = self._minute - age
        return np.asarray((taken[:, None] >= since) & (taken[:, None] >= 0) & (age[:, None] * STEP <= seconds))

    def _samples(self, i: int) -> list[Sample]:
        """Return the window of one service. Reuse most of it from the last question."""
        first = max(int(self._since[i]), self._minute - self._depth + 1, 0)
        built = self._built.setdefault(i, {})
        for minute in [m for m in built if m < first]:
            del built[minute]
        return [built.get(m) or built.setdefault(m, self._sample(i, m)) for m in range(first, self._minute + 1)]

    def _sample(self, i: int, minute: int) -> Sample:
        row = minute % self._depth
        r = {name: float(ring[row, i]) for name, ring in self._rings.items()}
        return Sample(
            time=EPOCH + timedelta(seconds=minute * STEP), pods=int(r["pods"]), usage=r["usage"],
            running=r["running"], waiting=r["waiting"], capacity_tokens=int(r["capacity"]),
            observed_dtype=self.pilots[i].dtype,
            flows=Flows(
                seconds=STEP * r["pods"], preemptions=r["preemptions"],
                prompt_tokens=r["finished"] * float(self._prompt[i]),
                generation_tokens=r["finished"] * float(self._output[i]), finished=r["finished"],
                prefill_seconds=r["prefill_seconds"], decode_seconds=r["decode_seconds"],
            ),
        )  # fmt: skip

    def _now(self) -> datetime:
        return EPOCH + timedelta(seconds=self._minute * STEP)

    def _learn(self, i: int) -> None:
        pilot = self.pilots[i]
        self._limits[i] = self._limit(i)
        self._memory[i] = any(k.memory and k.dtype == pilot.dtype for k in pilot.saturations)

    def _limit(self, i: int) -> float:
        """Return the rate per replica above which the pilot does not scale in, if it was learned from similar
        requests."""
        pilot = self.pilots[i]
        known = next((k for k in pilot.saturations if k.dtype == pilot.dtype), None)
        if (
            known is None
            or not _alike(known.mean_prompt, self._prompt[i])
            or not _alike(known.mean_generation, self._output[i])
        ):
            return float(np.inf)
        return SHARE * known.requests_per_hour / 3600

    def _gain_up(self, dtype: str) -> float:
        """Return the smallest loss of capacity (a factor) from a step to a larger dtype, or 0 at the top of the
        ladder."""
        rungs = (self._spec.kv_cache.baseline, *self._spec.kv_cache.ladder)
        return max((gain(dtype, d) for d in rungs if smaller(dtype, d)), default=0.0)


def _alike(seen: float, now: float) -> bool:
    return bool(1.99 * min(seen, now) >= max(seen, now))
