"""The recent scrapes of every revision, kept in memory: what a restart forgets it measures again."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from kvpilot_operator.api.spec import Spec
from kvpilot_operator.observe.plausible import Judged, Known, plausible_sample
from kvpilot_operator.observe.pod_metrics import PodMetrics
from kvpilot_operator.state.samples import NOTHING_OBSERVED, Flows, Sample
from kvpilot_operator.state.snapshot import ModelFacts, ServiceKey

log = logging.getLogger(__name__)

# Samples in the window of pressure: enough to say "nine in ten of them".
_PRESSURE_CELLS = 24
# Samples in a canary's step: as many slices as its two sides are compared in.
_STEP_CELLS = 20
# Samples are this close at most where a gap between them would read as missing scrapes.
_LONGEST_CELL_SECONDS = 45.0
# Samples that are kept of a window of a day, and beyond the windows of the workload.
_MOST_CELLS = 2400
_FAR_CELLS = 24


@dataclass(frozen=True, slots=True)
class Need:
    """What a service's decisions look back on, in seconds: `cell` apart over `near`, and wider apart over `far`."""

    near: float = 600.0
    far: float = 3600.0
    cell: float = 12.5
    pressure: float = 300.0
    """Without a trial, histograms are kept of these last seconds alone, and those of latencies only for objectives."""
    trial: bool = True
    """Whether a canary is compared with the stable side."""
    latencies: bool = False
    """Whether histograms of latencies are kept without one, for objectives."""

    @property
    def far_cell(self) -> float:
        """The time between two samples that are older than `near`."""
        return max(self.cell, self.far / _FAR_CELLS)


def need(spec: Spec, *, trial: bool) -> Need:
    """The windows of a spec: those that the workload is judged by, and beyond them the longest that a step may take."""
    canary, sustained = spec.canary, spec.kv_cache.pressure.sustained_seconds
    holds = [step.hold_seconds for step in canary.steps if step.hold_seconds]
    near = max(sustained, spec.scaling.scale_down_stabilization_seconds)
    far = max(near, canary.progress_deadline_seconds, *(hold + canary.warm_up_seconds for hold in holds))
    cell = min(sustained / _PRESSURE_CELLS, _LONGEST_CELL_SECONDS, *(hold / _STEP_CELLS for hold in holds))
    return Need(near, far, max(cell, near / _MOST_CELLS), sustained, trial, bool(spec.scaling.objectives))


@dataclass(slots=True)
class _Cell:
    """Scrapes that are merged into one sample, and how many they are."""

    sample: Sample
    scrapes: int = 1

    def merge(self, other: _Cell) -> None:
        """Take in a later cell: flows add up, gauges are averaged, all else is the later one's."""
        ours, theirs = self.sample, other.sample
        if not theirs.pods:
            self.sample = replace(ours, implausible=theirs.implausible, unanswered=theirs.unanswered)
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
        )
        self.scrapes = both


@dataclass(slots=True)
class _Series:
    """One revision's samples, oldest first, and the last pages of its pods."""

    known: Mapping[str, Known] = field(default_factory=dict)
    odd: frozenset[str] = frozenset()
    """What was odd about the last pages."""
    far: deque[_Cell] = field(default_factory=deque)
    near: deque[_Cell] = field(default_factory=deque)

    def turned_back(self, now: datetime) -> bool:
        """Forget what is dated later than now, and say whether anything was; the clock has been set back then."""
        ahead = now + timedelta(seconds=1)
        later = [pod for pod, known in self.known.items() if known.time > ahead]
        if not later:
            return False
        self.known = {pod: known for pod, known in self.known.items() if pod not in later}
        for cells in (self.near, self.far):
            while cells and cells[-1].sample.time > now:
                cells.pop()
        return True

    def add(self, sample: Sample, need: Need) -> None:
        """Append a sample, thin what has grown older, drop what nobody looks back on."""
        if not need.trial and not need.latencies:
            sample = replace(sample, flows=replace(sample.flows, ttft=NOTHING_OBSERVED, itl=NOTHING_OBSERVED))
        _append(self.near, _Cell(sample), need.cell)
        if not need.trial:
            self._thin(sample.time, need.pressure)
        while _age(self.near[0], sample.time) > need.near:
            _append(self.far, self.near.popleft(), need.far_cell)
        while self.far and _age(self.far[0], sample.time) > need.far:
            self.far.popleft()

    def _thin(self, now: datetime, seconds: float) -> None:
        """Drop the histograms of what is older, most of what a sample takes; older still, they are gone already."""
        for cell in reversed(self.near):
            flows = cell.sample.flows
            if _age(cell, now) > seconds:
                if flows.prompt_lengths is flows.generation_lengths is NOTHING_OBSERVED:
                    return
                none = NOTHING_OBSERVED
                scalars = replace(flows, ttft=none, itl=none, prompt_lengths=none, generation_lengths=none)
                cell.sample = replace(cell.sample, flows=scalars)


class Windows:
    """One service's samples by revision, as far back as its spec looks, thinned as they age."""

    __slots__ = ("_key", "_need", "_series")

    def __init__(self, key: ServiceKey) -> None:
        self._key = key
        self._series: dict[str, _Series] = {}
        self._need = Need()

    def keep(self, need: Need) -> None:
        """Look back this far from now on."""
        self._need = need

    def add(
        self,
        revision: str,
        time: datetime,
        pages: Mapping[str, PodMetrics],
        *,
        unanswered: int = 0,
        gpus: Mapping[str, str] | None = None,
    ) -> Judged:
        """Judge what a revision's pods answered, and keep it."""
        series = self._series.setdefault(revision, _Series())
        if series.turned_back(time):
            log.warning(
                "the clock was set back: scrapes of later than now are forgotten", extra={"service": str(self._key)}
            )
        judged = plausible_sample(time, series.known, pages, unanswered=unanswered, gpus=gpus)
        series.known = judged.known
        if judged.sample.pods or judged.sample.implausible:
            series.add(judged.sample, self._need)
        return judged

    def news(self, revision: str, odd: Collection[str]) -> Collection[str]:
        """What of all that is odd about a revision's pages now was not so about those before."""
        series = self._series[revision]
        before, series.odd = series.odd, frozenset(odd)
        return series.odd - before

    def samples(self) -> dict[str, tuple[Sample, ...]]:
        """All series, by revision."""
        return {name: tuple(cell.sample for cell in (*one.far, *one.near)) for name, one in self._series.items()}

    def model(self) -> ModelFacts | None:
        """The model's architecture as most of the service's pods have it; None where none has said it."""
        every = self._series.values()
        said = Counter(pod.page.model for one in every for pod in one.known.values() if pod.page.model is not None)
        return said.most_common(1)[0][0] if said else None

    def keep_only(self, revisions: Collection[str]) -> None:
        """Forget revisions that no longer run."""
        for name in [name for name in self._series if name not in revisions]:
            del self._series[name]


def _append(cells: deque[_Cell], cell: _Cell, width: float) -> None:
    if cells and cells[-1].sample.time.timestamp() // width == cell.sample.time.timestamp() // width:
        cells[-1].merge(cell)
    else:
        cells.append(cell)


def _age(cell: _Cell, now: datetime) -> float:
    return (now - cell.sample.time).total_seconds()
