"""Policies that control a simulated service: the pilot, and fixed replicas. Each acts after every scrape."""

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from kvpilot_cli.backtest.engine import EPOCH
from kvpilot_cli.backtest.pilot import Pilot
from kvpilot_cli.backtest.service import Service
from kvpilot_operator.decide.traffic_plan import Counts, rolling_step
from kvpilot_operator.state.samples import Sample

SCRAPE = 15.0
"""Seconds between two scrapes and thus two decisions: the period of the HorizontalPodAutoscaler."""
PROBE_SECONDS = 300.0
"""Duration of a canary's accuracy probes in seconds. The canary gets no traffic meanwhile."""
_KEEP = timedelta(hours=1)


class Policy(Protocol):
    """Policy that chooses the dtype and the number of replicas of one simulated service."""

    def judge(self, service: Service, sample: Sample | None) -> None:
        """Change the service if needed. `sample` is the service's last scrape, or None if no replica answered."""


class Fixed:
    """Policy that keeps the dtype and the number of replicas."""

    def judge(self, service: Service, sample: Sample | None) -> None:
        """Change nothing, whatever the sample shows."""


@dataclass
class Piloted:
    """Policy of kvpilot in mode Auto with scaling mode Operator: the operator's decisions, and a rollout."""

    pilot: Pilot
    replicas: int
    canary: str | None = None
    probed_at: float | None = None
    samples: deque[Sample] = field(default_factory=deque)
    journal: list[str] = field(default_factory=list)

    def judge(self, service: Service, sample: Sample | None) -> None:
        """Run one reconcile: store the sample, continue the rollout of another dtype, and decide."""
        now = EPOCH + timedelta(seconds=service.now)
        if sample is not None:
            self.samples.append(sample)
            while self.samples[0].time < now - _KEEP:
                self.samples.popleft()
        if self.canary is not None:
            self._roll(service)
        ready = len(service.ready(self.pilot.dtype))
        busy = "a canary is in flight" if self.canary is not None else None
        # A surge may abort a canary that does not serve yet. Here a canary serves as soon as its probes have passed.
        yields = self.canary is not None and self.canary not in service.serving
        decision, _ = self.pilot.rule(tuple(self.samples), now, self.replicas, ready, busy, yields)
        chosen = decision.chosen
        if chosen.action == "Stay":
            return
        if self.canary is not None:
            service.scale(self.canary, 0)
            self.canary = None
        self.journal.append(
            f"{service.now / 3600:.2f} h {decision.reason}: {chosen.action} {chosen.dtype} "
            f"{chosen.replicas} replicas: {decision.message}"
        )
        if chosen.dtype != self.pilot.dtype:
            self.canary, self.probed_at = chosen.dtype, None
            service.scale(chosen.dtype, 1)
        else:
            self.replicas = chosen.replicas
            self.pilot.replicas_changed = now
            service.scale(self.pilot.dtype, self.replicas)
            service.outcome.scalings += 1

    def _roll(self, service: Service) -> None:
        """Continue a rollout: wait until the canary is ready and probed, then replace the other replicas one by one."""
        new, old = self.canary, self.pilot.dtype
        assert new is not None  # noqa: S101 - called only while a canary exists
        if not service.ready(new):
            return
        if self.probed_at is None:
            self.probed_at = service.now + PROBE_SECONDS
        if service.now < self.probed_at:
            return
        service.serve(new)
        if len(service.ready(new)) >= self.replicas:
            service.outcome.flips += 1
            service.switch(new)
            self.pilot.dtype, self.canary = new, None
            self.pilot.dtype_changed = EPOCH + timedelta(seconds=service.now)
            self.samples.clear()
            return
        grown, left = rolling_step(
            Counts(len(service.of(new)), len(service.ready(new))),
            self.replicas,
            Counts(len(service.of(old)), len(service.ready(old))),
            total=self.replicas + 1,
            floor=self.replicas,
            both_serve=True,
        )
        service.scale(new, grown)
        service.scale(old, left)
