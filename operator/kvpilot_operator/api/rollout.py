"""Changes of a revision in a service's spec: the canary, the accuracy that it must show, and when to hold still."""

from typing import Annotated, Literal

from msgspec import Meta

from kvpilot_operator.api.gateways import RouteRef
from kvpilot_operator.api.record import NAME, SET, Percent, Record, Rule, Thousand

_BUILT_IN = "builtin/(general|multi-turn|long-context|structured|paths|agent|reasoning)"
ProbeSet = Annotated[str, Meta(max_length=263, pattern=f"^({_BUILT_IN}|configmap/{NAME})$")]

_UPWARDS = Rule(
    "",
    "[0, 1, 2, 3, 4, 5, 6, 7, 8].all(i, i + 1 >= size(self) || self[i].weightPercent < self[i + 1].weightPercent)",
    "canary.steps: order them so that each weightPercent is above the one before",
)


class CanaryStep(Record, frozen=True):
    """One item of spec.canary.steps."""

    weight_percent: Annotated[int, Meta(ge=0, le=100)]
    """Share of requests, in percent, that goes to the canary. 100 is the promotion itself and is not judged. 0 needs an
    HTTPRoute, which copies as many requests to the canary as one stable replica gets; no user sees its answers."""
    hold_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 600
    """Seconds to stay at this share before the next step. At least 30 seconds of figures are judged."""


class Canary(Record, frozen=True):
    """Trial of a new revision before it takes the traffic. Read anew for each canary."""

    capacity_policy: Literal["Surge", "ReplaceOne", "SurgeOrReplaceOne", "WhenIdle"] = "SurgeOrReplaceOne"
    """Source of the canary's GPUs. Surge: spare ones, for which it waits. ReplaceOne: one stable replica, which leaves
    first. SurgeOrReplaceOne: spare ones, or else a stable replica. WhenIdle: a stable replica, even the only one, once
    the service has had no request for 300 seconds."""
    steps: Annotated[tuple[CanaryStep, ...], Meta(max_length=10, extra={"rules": (_UPWARDS,)})] = ()
    """Shares of live traffic that a canary takes after its probes have passed, in increasing order. Without steps it
    then takes all traffic in one switch."""
    warm_up_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 60
    """Seconds at the start of each step whose figures do not count: caches are cold and graphs are still compiled."""
    min_requests: Annotated[int, Meta(ge=10, le=1_000_000)] = 100
    """Requests that both sides must have finished before a step is judged. Fewer are inconclusive."""
    max_ttft_p95_regression_percent: Thousand = 10
    """By how many percent the 95th percentile of the time to first token may be above the stable side's."""
    max_itl_p95_regression_percent: Thousand = 10
    """By how many percent the 95th percentile of the time between two tokens may be above the stable side's."""
    max_throughput_regression_percent: Percent = 10
    """By how many percent the tokens per second of a running request may be below the stable side's."""
    max_error_increase_percent: Percent = 1
    """By how many percentage points the share of failed requests may be above the stable side's."""
    progress_deadline_seconds: Annotated[int, Meta(ge=30, le=604_800)] = 3600
    """Seconds that one stage of a canary may take without progress: to start, to be probed, to put a step's share in
    effect, to reach a verdict after a step's warmUpSeconds and holdSeconds (or 30 seconds of figures, if longer), to
    move one replica in a promotion. Warm-up, holds and pauses do not count. After it the canary is rolled back."""
    route_ref: RouteRef | None = None


class Accuracy(Record, frozen=True):
    """Accuracy that a canary, and later the serving replicas, must show against the 16-bit baseline of the same model.
    Read anew for each probe run."""

    probe_sets: Annotated[tuple[ProbeSet, ...], Meta(min_length=1, max_length=16, extra=SET)] = (
        "builtin/general", "builtin/multi-turn", "builtin/long-context", "builtin/structured",
    )  # fmt: skip
    """Prompts that are asked: a built-in pack (docs/accuracy-packs.md), or configmap/NAME for your own (key
    prompts.yaml of a ConfigMap of this namespace). A change captures the baseline anew."""
    max_excess_kl_millinats: Annotated[int, Meta(ge=0, le=100_000)] = 20
    """By how many thousandths of a nat the mean KL divergence of the canary from the baseline may be above that of the
    baseline from itself (the control run), in each bucket of prompts. Damage up to half of it fails at most 2 in 1,000
    canaries."""
    min_top1_agreement_percent: Percent = 97
    """Percentage of positions at which canary and baseline find the same token most likely, lowered by what the control
    run itself disagrees. A canary is below it only beyond doubt, at an error of 1 in 1,000."""
    failure_limit: Annotated[int, Meta(ge=1, le=100)] = 1
    """Failed probe runs at which a canary is rolled back, and failed runs in a row at which onFailure takes effect for
    the serving replicas."""
    consecutive_error_limit: Annotated[int, Meta(ge=1, le=100)] = 4
    """Probe runs in a row without a verdict (a timeout, a refused connection) at which a canary is rolled back; its
    dtype may be tried again within the hour. For the serving replicas only AccuracyVerified becomes Unknown."""
    period_seconds: Annotated[int, Meta(ge=60, le=2_592_000)] = 900
    """Seconds between two probe runs against the serving replicas, one replica a run; none while the baseline dtype
    serves."""
    on_failure: Literal["Rollback", "Report"] = "Rollback"
    """Reaction to a serving dtype that fails. Rollback: back to the last good dtype, and the failed one is denied.
    Report: the condition AccuracyVerified says so, and nothing moves. A canary that fails is rolled back in either
    case."""


class Rollout(Record, frozen=True):
    """Rules for every change of revision."""

    deny_seconds: Annotated[int, Meta(ge=0, le=31_536_000)] = 604_800
    """Seconds for which a dtype that failed is not tried again with the same model, image and GPU."""
    paused: bool = False
    """true: no canary is started and a running one is neither promoted nor rolled back. Serving, scaling and status go
    on. Takes effect at the next reconcile."""
