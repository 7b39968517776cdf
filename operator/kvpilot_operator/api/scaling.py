"""Replicas in a service's spec: their number, and rules for their removal."""

from typing import Annotated, Literal

from msgspec import Meta

from kvpilot_operator.api.record import Record, Thousand, keyed_by


class Objective(Record, frozen=True):
    """One item of spec.scaling.objectives."""

    metric: Literal["TTFT", "ITL"]
    """TTFT: time to first token. ITL: time between two tokens."""
    percentile: Annotated[int, Meta(ge=50, le=99)]
    """Share of requests (TTFT) or tokens (ITL), in percent, that must stay within `milliseconds`."""
    milliseconds: Annotated[int, Meta(ge=1, le=3_600_000)]
    """Longest allowed time."""

    def __str__(self) -> str:
        return f"{self.metric} p{self.percentile}"


class Scaling(Record, frozen=True):
    """Number of replicas: its limits, and the party that chooses it."""

    mode: Literal["Operator", "External"] = "Operator"
    """The party that chooses the number of replicas. Operator: kvpilot does, and weighs one more replica against a
    smaller dtype. External: an autoscaler (HPA, KEDA) or a person writes /scale. Do not use an autoscaler with
    Operator, because the two would overwrite each other's number."""
    min_replicas: Thousand = 1
    """Smallest number of replicas. 0 allows /scale to stop all replicas."""
    max_replicas: Annotated[int, Meta(ge=1, le=1_000)] = 8
    """Largest number of replicas. A canary may add one while it runs."""
    scale_down_stabilization_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 600
    """Seconds for which fewer replicas must have been enough before kvpilot removes one."""
    objectives: Annotated[tuple[Objective, ...], Meta(max_length=8, extra=keyed_by("metric", "percentile"))] = ()
    """Latency objectives, measured by vLLM's histograms over kvCache.pressure.sustainedSeconds. If one is missed,
    kvpilot takes a smaller dtype if KV memory is the limit, otherwise it adds replicas. If all are held and one of them
    is for TTFT, waiting requests alone add no replica."""

    def clamp(self, replicas: int) -> int:
        """Return the number of replicas, limited to min_replicas and max_replicas."""
        return max(self.min_replicas, min(self.max_replicas, replicas))


class Drain(Record, frozen=True):
    """Shutdown of a replica without lost requests. The pod's termination grace period is the sum of preStopSeconds and
    timeoutSeconds, plus 10 seconds. The default of 115 seconds fits the 120 seconds of an AWS spot notice. A change
    starts a new revision."""

    pre_stop_seconds: Annotated[int, Meta(ge=0, le=600)] = 15
    """Seconds from a pod's removal from the Service to its stop signal, so that clients and proxies notice the
    removal."""
    timeout_seconds: Annotated[int, Meta(ge=1, le=7_200)] = 90
    """Seconds that running requests get to finish after the stop signal."""


class Disruption(Record, frozen=True):
    """Replicas that node drains and upgrades may remove. A change takes effect at once."""

    max_unavailable: Thousand | Annotated[str, Meta(max_length=4, pattern="^(100|[1-9]?[0-9])%$")] = 1
    """Number of replicas, or a share of them such as "25%" (rounded up), that may be missing at one time. 0 blocks node
    drains. Canaries obey this limit, too. They replace the last replica only if the limit is "100%" or
    canary.capacityPolicy is WhenIdle."""

    def unavailable(self, replicas: int) -> int:
        """Return how many of `replicas` may be missing at one time (`max_unavailable`)."""
        asked = self.max_unavailable
        return asked if isinstance(asked, int) else -(-int(asked.removesuffix("%")) * replicas // 100)

    def least(self, replicas: int) -> int:
        """Return the number of pods that must keep answering during kvpilot's own changes."""
        last = 0 if self.max_unavailable == "100%" else min(1, replicas)
        return max(last, replicas - self.unavailable(replicas))
