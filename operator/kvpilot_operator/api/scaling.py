"""Replicas in a service's spec: their number, and how they may leave."""

from typing import Annotated, Literal

from msgspec import Meta

from kvpilot_operator.api.record import Record, Thousand, keyed_by


class Objective(Record, frozen=True):
    """One item of spec.scaling.objectives."""

    metric: Literal["TTFT", "ITL"]
    """TTFT: time to first token. ITL: time between two tokens."""
    percentile: Annotated[int, Meta(ge=50, le=99)]
    """The share of requests (TTFT) or tokens (ITL) that it is to hold for, in percent."""
    milliseconds: Annotated[int, Meta(ge=1, le=3_600_000)]
    """The longest time."""

    def __str__(self) -> str:
        return f"{self.metric} p{self.percentile}"


class Scaling(Record, frozen=True):
    """Number of replicas: who decides it, and its bounds."""

    mode: Literal["Operator", "External"] = "Operator"
    """Operator: kvpilot weighs a replica more against a smaller dtype. External: an autoscaler (HPA, KEDA) or a person
    writes /scale, and kvpilot never chooses a number. Never both: two writers of one number fight."""
    min_replicas: Thousand = 1
    """Fewest replicas. 0 lets /scale stop the service altogether."""
    max_replicas: Annotated[int, Meta(ge=1, le=1_000)] = 8
    """Most replicas. A canary may add one for as long as it lasts."""
    scale_down_stabilization_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 600
    """Seconds for which fewer replicas must have been enough before kvpilot scales in."""
    objectives: Annotated[tuple[Objective, ...], Meta(max_length=8, extra=keyed_by("metric", "percentile"))] = ()
    """Latencies to hold, by vLLM's histograms over kvCache.pressure.sustainedSeconds. A missed one calls for a smaller
    dtype where memory binds, else for replicas; where all are held, and one is of TTFT, no replica is added for a
    queue."""

    def clamp(self, replicas: int) -> int:
        """Return the nearest number of replicas within min_replicas and max_replicas."""
        return max(self.min_replicas, min(self.max_replicas, replicas))


class Drain(Record, frozen=True):
    """Shutdown of a replica without losing requests. Its pod gets 10 seconds more than both fields together: 115 by
    default, which fits the 120 of an AWS spot notice. A change starts a new revision."""

    pre_stop_seconds: Annotated[int, Meta(ge=0, le=600)] = 15
    """Seconds between leaving the Service and the stop signal, for clients and proxies to notice."""
    timeout_seconds: Annotated[int, Meta(ge=1, le=7_200)] = 90
    """Seconds that running requests get to finish after the stop signal."""


class Disruption(Record, frozen=True):
    """Replicas that node drains and upgrades may take. Takes effect at once."""

    max_unavailable: Thousand | Annotated[str, Meta(max_length=4, pattern="^(100|[1-9]?[0-9])%$")] = 1
    """Replicas, or percent of them such as "25%" (rounded up), that may be away at a time. 0 blocks drains. Canaries
    obey it too, and never take the last replica unless it is 100%."""

    def unavailable(self, replicas: int) -> int:
        """Return the number of `replicas` that may be away."""
        asked = self.max_unavailable
        return asked if isinstance(asked, int) else -(-int(asked.removesuffix("%")) * replicas // 100)

    def least(self, replicas: int) -> int:
        """Return the number of pods that must keep answering during kvpilot's own changes."""
        last = 0 if self.max_unavailable == "100%" else min(1, replicas)
        return max(last, replicas - self.unavailable(replicas))
