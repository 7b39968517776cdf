"""Keep the recent scrapes of every revision. They exist only in memory, so a restart of the operator loses them."""

import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.observe.plausible import Known, plausible_sample
from kvpilot_operator.observe.pod_metrics import PodMetrics
from kvpilot_operator.state.samples import NOTHING_OBSERVED, Flows, Sample
from kvpilot_operator.state.snapshot import ModelFacts, ServiceKey

log = logging.getLogger(__name__)

# Number of samples in the pressure window: enough to tell if nine in ten are above the threshold.
_PRESSURE_BUCKETS = 24
# Number of samples in a canary's traffic step. Decisions cut the step into slices of time that each have samples, and
# need at least 26 slices to compare the canary with the stable revision.
_STEP_BUCKETS = 40
# Longest time, in seconds, over which the near window (`SampleRetention`) merges samples into one. With a longer time,
# two samples could be 60 s (`STALE_SECONDS`) apart, which counts as a gap.
_LONGEST_BUCKET_SECONDS = 45.0
# Largest number of samples in the near window, which may last a day.
_MOST_BUCKETS = 2400
# Samples beyond the near window are merged, as long as a merged sample spans at most this share of its age. The second
# share applies during a trial. A traffic step is then judged by a stretch of time that is kept until twice as much time
# has passed. A merged sample across the stretch's start or end does not count, so merged samples must be short.
_SPAN, _TRIAL_SPAN = 1 / 12, 1 / 32


@dataclass(frozen=True, slots=True)
class SampleRetention:
    """Rules for which samples of a service to keep. All times are in seconds.

    Up to the age `near`, one sample per `bucket` is kept. Up to the age `far`, samples get fewer with their age.
    """

    near: float = 600.0
    far: float = 3600.0
    bucket: float = 12.5
    pressure: float = 300.0
    """Length in seconds of the newest part of the window. Without a trial, only samples in it keep their histograms."""
    trial: bool = True
    """True while a canary is compared with the stable revision."""
    latencies: bool = False
    """True to keep latency histograms even without a trial, because the spec has latency objectives."""


def retention_of(spec: Spec, *, trial: bool) -> SampleRetention:
    """Return the retention that a spec's decisions need.

    `near` covers the pressure window and the stabilization of scale-downs, `far` a canary's longest traffic step up to
    its deadline.
    """
    canary, sustained = spec.canary, spec.kv_cache.pressure.sustained_seconds
    holds = [step.hold_seconds for step in canary.steps if step.hold_seconds]
    longest = max(holds, default=0) + canary.warm_up_seconds + canary.progress_deadline_seconds
    near = max(sustained, spec.scaling.scale_down_stabilization_seconds)
    far = max(near, longest)
    bucket = min(sustained / _PRESSURE_BUCKETS, _LONGEST_BUCKET_SECONDS, *(hold / _STEP_BUCKETS for hold in holds))
    return SampleRetention(
        near, far, max(bucket, near / _MOST_BUCKETS), sustained, trial, bool(spec.scaling.objectives)
    )


@dataclass(slots=True)
class _Merged:
    """A sample merged from several scrapes, and their number."""

    sample: Sample
    scrapes: int = 1

    def merge(self, other: "_Merged") -> None:
        """Merge a later sample: add up the flows, average the gauges, and take everything else from the later one."""
        ours, theirs = self.sample, other.sample
        if not theirs.pods:
            told = theirs if theirs.observed_dtype else ours
            self.sample = replace(
                ours,
                implausible=theirs.implausible,
                unanswered=theirs.unanswered,
                stalled=theirs.stalled,
                observed_dtype=told.observed_dtype,
                other_dtypes=told.other_dtypes,
            )
            return
        if not ours.pods:
            self.sample, self.scrapes = theirs, other.scrapes
            return
        both = self.scrapes + other.scrapes
        share = other.scrapes / both
        self.sample = replace(
            theirs,
            usage=ours.usage + (theirs.usage - ours.usage) * share,
            running=ours.running + (theirs.running - ours.running) * share,
            waiting=ours.waiting + (theirs.waiting - ours.waiting) * share,
            flows=Flows.together((theirs.flows, ours.flows)),
            spread=ours.spread.mixed(theirs.spread, share) if ours.spread and theirs.spread else theirs.spread,
        )
        self.scrapes = both


@dataclass(slots=True)
class _Series:
    """Samples of one revision, oldest first, and the last pages of its pods."""

    known: Mapping[str, Known] = field(default_factory=dict)
    far: deque[_Merged] = field(default_factory=deque)
    near: deque[_Merged] = field(default_factory=deque)

    def turned_back(self, now: datetime) -> bool:
        """Drop samples from the future. Return True if the clock was set back."""
        ahead = now + timedelta(seconds=1)
        later = [pod for pod, known in self.known.items() if known.time > ahead]
        if not later:
            return False
        self.known = {pod: known for pod, known in self.known.items() if pod not in later}
        for buckets in (self.near, self.far):
            while buckets and buckets[-1].sample.time > now:
                buckets.pop()
        return True

    def add(self, sample: Sample, retention: SampleRetention) -> None:
        """Append a sample, merge older samples into wider buckets, and drop samples beyond both windows."""
        if not retention.trial and not retention.latencies:
            sample = replace(sample, flows=replace(sample.flows, ttft=NOTHING_OBSERVED, itl=NOTHING_OBSERVED))
        _append(self.near, _Merged(sample), retention.bucket)
        if not retention.trial:
            self._thin(sample.time, retention.pressure)
        known = len(self.far)
        while _age(self.near[0], sample.time) > retention.near:
            self.far.append(self.near.popleft())
        if len(self.far) > known:
            self._widen(sample.time, _TRIAL_SPAN if retention.trial else _SPAN)
        while self.far and _age(self.far[0], sample.time) > retention.far:
            self.far.popleft()

    def _widen(self, now: datetime, span: float) -> None:
        """Merge far samples with their neighbours, as long as a merged sample spans at most `span` of its age."""
        wider: deque[_Merged] = deque()
        for bucket in self.far:
            # The increments of a sample begin at the sample before it.
            begin = wider[-2].sample.time if len(wider) > 1 else None
            if begin is not None and (bucket.sample.time - begin).total_seconds() <= span * _age(bucket, now):
                wider[-1].merge(bucket)
            else:
                wider.append(bucket)
        self.far = wider

    def _thin(self, now: datetime, seconds: float) -> None:
        """Drop the histograms of samples older than `seconds`, because they take most of the memory."""
        for bucket in reversed(self.near):
            flows = bucket.sample.flows
            if _age(bucket, now) > seconds:
                if flows.generation_lengths is NOTHING_OBSERVED:
                    return
                none = NOTHING_OBSERVED
                scalars = replace(flows, ttft=none, itl=none, generation_lengths=none)
                bucket.sample = replace(bucket.sample, flows=scalars)


class Windows:
    """The samples of one service by revision, as far back as its spec needs. Older samples are merged."""

    __slots__ = ("_key", "_series", "retention")

    def __init__(self, key: ServiceKey) -> None:
        self._key = key
        self._series: dict[str, _Series] = {}
        self.retention = SampleRetention()

    def add(
        self,
        revision: str,
        time: datetime,
        pages: Mapping[str, PodMetrics],
        *,
        unanswered: int = 0,
        gpus: Mapping[str, str] | None = None,
    ) -> None:
        """Judge the metrics pages of a revision's pods, and keep the sample. See `plausible_sample` for parameters."""
        series = self._series.setdefault(revision, _Series())
        if series.turned_back(time):
            log.warning(
                "the clock was set back: scrapes from the future are dropped", extra={"service": str(self._key)}
            )
        told, series.known = plausible_sample(time, series.known, pages, unanswered=unanswered, gpus=gpus)
        if told.pods or told.implausible or told.stalled or told.observed_dtype:
            series.add(told, self.retention)

    def samples(self) -> dict[str, tuple[Sample, ...]]:
        """Return all kept samples by revision, oldest first."""
        return {name: tuple(bucket.sample for bucket in (*one.far, *one.near)) for name, one in self._series.items()}

    def model(self) -> ModelFacts | None:
        """Return the model architecture that most pods of the service report. Return None if no pod reports one."""
        every = self._series.values()
        said = Counter(pod.page.model for one in every for pod in one.known.values() if pod.page.model is not None)
        return said.most_common(1)[0][0] if said else None

    def keep_only(self, revisions: Collection[str]) -> None:
        """Drop the samples of all revisions that are not in `revisions`."""
        for name in [name for name in self._series if name not in revisions]:
            del self._series[name]


def _append(buckets: deque[_Merged], bucket: _Merged, width: float) -> None:
    if buckets and buckets[-1].sample.time.timestamp() // width == bucket.sample.time.timestamp() // width:
        buckets[-1].merge(bucket)
    else:
        buckets.append(bucket)


def _age(bucket: _Merged, now: datetime) -> float:
    return (now - bucket.sample.time).total_seconds()
