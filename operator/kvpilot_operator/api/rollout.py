"""Rules for new revisions in a service's spec: the canary, the accuracy that it must show, and pauses."""

from typing import Annotated, Literal

from msgspec import Meta

from kvpilot_operator.api.gateways import RouteRef
from kvpilot_operator.api.record import NAME, SET, Percent, Record, Rule, Thousand

_BUILT_IN = "builtin/(general|multi-turn|structured|long-context|paths|agent|reasoning|images)"
ProbeSet = Annotated[str, Meta(max_length=263, pattern=f"^({_BUILT_IN}|configmap/{NAME})$")]

_UPWARDS = Rule(
    "",
    "[0, 1, 2, 3, 4, 5, 6, 7, 8].all(i, i + 1 >= size(self) || self[i].weightPercent < self[i + 1].weightPercent)",
    "canary.steps: order them so that each weightPercent is above the one before",
)


class CanaryStep(Record, frozen=True):
    """One item of spec.canary.steps."""

    weight_percent: Annotated[int, Meta(ge=0, le=100)]
    """Share of requests, in percent, that goes to the canary. At 0, a route (canary.routeRef) copies as many requests
    to the canary as one stable replica gets, and no user sees the canary's answers. Without a route, this step is
    skipped. 100 is the promotion itself and is not judged."""
    hold_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 600
    """Seconds to stay at this share before the next step. A step is judged by at least 30 seconds of measurements."""


class Canary(Record, frozen=True):
    """Trial of a new revision before it takes the traffic. A change takes effect for the next canary."""

    capacity_policy: Literal["Surge", "ReplaceOne", "SurgeOrReplaceOne", "WhenIdle"] = "SurgeOrReplaceOne"
    """Source of the canary's GPUs. Surge: spare GPUs; the canary waits for them. ReplaceOne: the GPUs of one stable
    replica, which is removed first. SurgeOrReplaceOne: spare GPUs if there are any, otherwise as ReplaceOne. WhenIdle:
    as ReplaceOne, even with the only replica, but only after 300 seconds without a request."""
    steps: Annotated[tuple[CanaryStep, ...], Meta(max_length=10, extra={"rules": (_UPWARDS,)})] = ()
    """Shares of live traffic that a canary takes after its probes have passed, in increasing order. Without steps, a
    canary that has passed its probes takes all traffic at once."""
    warm_up_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 60
    """Seconds at the start of each step whose measurements do not count, because caches are cold and graphs are still
    compiled."""
    min_requests: Annotated[int, Meta(ge=10, le=1_000_000)] = 100
    """Number of requests that the canary and the stable revision must each have finished before a step is judged. With
    fewer requests, the verdict is Inconclusive."""
    max_ttft_p95_regression_percent: Thousand = 10
    """Allowed increase of the 95th percentile of the time to first token over the stable revision's, in percent."""
    max_itl_p95_regression_percent: Thousand = 10
    """Allowed increase of the 95th percentile of the time between two tokens over the stable revision's, in percent."""
    max_throughput_regression_percent: Percent = 10
    """Allowed decrease of the tokens per second of a running request below the stable revision's, in percent."""
    max_error_increase_percent: Percent = 1
    """Allowed increase of the share of failed requests over the stable revision's, in percentage points."""
    progress_deadline_seconds: Annotated[int, Meta(ge=30, le=604_800)] = 3600
    """Seconds that one stage of a canary may take without progress. After that the canary is rolled back. The stages
    are: start, probes, the switch to a step's share, the verdict of a step, and each replica of a promotion. Pauses and
    a step's warmUpSeconds and holdSeconds (at least 30 seconds of measurements) do not count. A probe run stops
    after half of this time, and is judged by what it has compared."""
    route_ref: RouteRef | None = None


class Accuracy(Record, frozen=True):
    """Accuracy that a canary, and later the serving replicas, must reach compared with the 16-bit baseline of the same
    model. A change takes effect for the next probe run."""

    probe_sets: Annotated[tuple[ProbeSet, ...], Meta(min_length=1, max_length=16, extra=SET)] = (
        "builtin/general", "builtin/multi-turn", "builtin/long-context", "builtin/structured",
    )  # fmt: skip
    """Prompts of the probes: built-in packs (docs/accuracy-packs.md), or configmap/NAME for your own prompts (key
    prompts.yaml of a ConfigMap of this namespace). After a change, kvpilot captures the baseline anew."""
    max_excess_kl_millinats: Annotated[int, Meta(ge=0, le=100_000)] = 20
    """Allowed damage, in thousandths of a nat: the canary's mean KL divergence from the baseline, less that of the
    baseline from itself (the control run). It applies to each bucket of prompts. At most 2 in 1,000 canaries with
    half of the allowed damage or less fail."""
    min_top1_agreement_percent: Percent = 97
    """Required share of positions, in percent, at which canary and baseline find the same token most likely. It is
    lowered by the disagreement of the baseline with itself (the control run). The test fails at most 1 in 1,000
    canaries whose share is not below the limit."""
    failure_limit: Annotated[int, Meta(ge=1, le=100)] = 1
    """Number of failed probe runs after which a canary is rolled back. For the serving replicas, the number of failed
    runs in a row after which onFailure takes effect."""
    consecutive_error_limit: Annotated[int, Meta(ge=1, le=100)] = 4
    """Number of probe runs in a row without a verdict (a timeout, a refused connection) after which a canary is rolled
    back. Its dtype may be tried again within an hour. For the serving replicas, the only effect is that the condition
    AccuracyVerified becomes Unknown."""
    period_seconds: Annotated[int, Meta(ge=60, le=2_592_000)] = 900
    """Seconds between two probe runs of the serving replicas. Each run probes one replica. While the baseline dtype
    serves, there are no runs. A run stops after this time, but not before 900 seconds, and is judged by what it has
    compared."""
    on_failure: Literal["Rollback", "Report"] = "Rollback"
    """Reaction if the serving dtype fails its probes. Rollback: kvpilot denies the dtype and moves to a safer one.
    Report: kvpilot only sets the condition AccuracyVerified to False. A canary that fails is rolled back in either
    case."""


class Rollout(Record, frozen=True):
    """Rules for every new revision."""

    deny_seconds: Annotated[int, Meta(ge=0, le=31_536_000)] = 604_800
    """Seconds for which kvpilot does not try a failed dtype again with the same model, image and GPU."""
    paused: bool = False
    """True to pause rollouts: kvpilot starts no canary, and neither promotes nor rolls back a running one. Serving,
    scaling and the status continue. A change takes effect at the next reconcile."""
