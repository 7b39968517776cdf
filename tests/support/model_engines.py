"""Engines of a model cluster: pods that need a GPU and time to start, and their metrics under load."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from types import MappingProxyType

from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.objects import PodView
from kvpilot_operator.state.samples import Flows
from support.services import pod

# Upper bounds of vLLM 0.32's histogram buckets, as far as values of the simulation reach.
TTFT = (0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
LENGTHS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
TOKENS = 100.0
ALONE: Mapping[str, int] = MappingProxyType({})
"""Value for the argument `nodes` if every replica is a single pod."""


@dataclass(frozen=True)
class ModelPod:
    """Pod that becomes ready `starts_in` ticks after it got a GPU, and ends `leaves_in` ticks after its deletion."""

    revision: str
    index: int
    placed: bool = False
    starts_in: int = 0
    leaves_in: int | None = None
    ready: bool = False
    """True if its engine answers. It gets requests only if its readiness gate, if any, is open, too."""
    gated: bool = True

    @property
    def name(self) -> str:
        """Name of the Pod."""
        return f"{self.revision}-{self.index}"

    @cache  # noqa: B019 - it is a value, of which a model has few
    def view(self, admitted: bool) -> PodView:
        """Return the pod's view as its kubelet reports it."""
        net = ".".join(str(byte) for byte in bytes.fromhex(self.revision[:4]))
        base = replace(
            pod(self.revision),
            name=self.name,
            ip=f"10.{net}.{self.index}",
            ready=self.ready and (admitted or not self.gated),
            containers_ready=self.ready,
            admitted=admitted if self.gated else None,
        )
        if self.leaves_in is not None:
            return replace(base, terminating=True, ready=False, containers_ready=False)
        return base if self.placed else replace(base, ip=None, node=None, unschedulable="0/1 nodes have a free GPU")


@dataclass
class ModelEngines:
    """All engine pods. `places` is the number of GPUs; None means unlimited."""

    places: int | None = None
    start_ticks: int = 0
    drain_ticks: int = 0
    starts: bool = True
    pods: tuple[ModelPod, ...] = ()
    evicted: frozenset[tuple[str, int]] = frozenset()
    """Revision and index of evicted pods. Later pods do not reuse these names."""
    admitted: frozenset[str] = frozenset()
    """Names of pods with an open readiness gate."""

    def views(self, nodes: Mapping[str, int] = ALONE) -> list[PodView]:
        """Return the pods that take requests, with their workers. `nodes` has the pods of a replica by revision."""

        def group(leader: PodView) -> PodView:
            names = [f"{leader.name}-{worker}" for worker in range(1, nodes.get(leader.revision, 1))]
            workers = tuple(replace(leader, name=name, ip=None) for name in names)
            return replace(leader, workers=workers) if workers else leader

        return [group(p.view(p.name in self.admitted)) for p in self.pods]

    def tick(self) -> None:
        """Advance one tick: terminating pods end, and starting pods come closer to ready."""
        left = [replace(p, leaves_in=None if p.leaves_in is None else p.leaves_in - 1) for p in self.pods]
        self.pods = tuple(p for p in left if p.leaves_in is None or p.leaves_in >= 0)
        self._place()
        self.pods = tuple(replace(p, starts_in=max(0, p.starts_in - 1)) if p.placed else p for p in self.pods)

    def reconcile(self, wanted: dict[str, int], gated: Mapping[str, bool]) -> None:
        """Act as the Deployment controller: create missing pods, and delete surplus ones, unready ones first.

        A new pod has a readiness gate if its revision is `gated`.
        """
        for revision in {*wanted, *(p.revision for p in self.pods)}:
            mine = [p for p in self.pods if p.revision == revision and p.leaves_in is None]
            surplus = len(mine) - wanted.get(revision, 0)
            for p in sorted(mine, key=lambda p: (p.ready, -p.index))[: max(0, surplus)]:
                gone = () if not p.placed or not self.drain_ticks else (replace(p, leaves_in=self.drain_ticks),)
                self.pods = (*(q for q in self.pods if q is not p), *gone)
            taken = {p.index for p in self.pods if p.revision == revision}
            taken |= {index for name, index in self.evicted if name == revision}
            free = (i for i in range(10_000) if i not in taken)
            new = ModelPod(revision, 0, starts_in=self.start_ticks, gated=gated.get(revision, True))
            fresh = [replace(new, index=next(free)) for _ in range(max(0, -surplus))]
            self.pods = (*self.pods, *fresh)
        self._place()

    def roll(self, revision: str) -> None:
        """Replace one gated pod with a pod without a gate, as LeaderWorkerSet does after a change of the template."""
        mine = [p for p in self.pods if p.revision == revision and p.leaves_in is None]
        if all(p.gated or p.ready for p in mine):
            self.evict(revision, gated=True)

    def evict(self, revision: str, *, gated: bool = False) -> None:
        """Evict the revision's first pod that is not terminating. Its controller will replace it."""
        mine = [p for p in self.pods if p.revision == revision and p.leaves_in is None]
        for one in [p for p in mine if p.gated or not gated][:1]:
            self.evicted |= {(one.revision, one.index)}
            gone = (replace(one, leaves_in=self.drain_ticks),) if one.placed and self.drain_ticks else ()
            self.pods = (*(p for p in self.pods if p is not one), *gone)

    def ready(self, revision: str) -> int:
        """Return the number of the revision's pods that answer and get requests."""
        return sum(not p.gated or p.name in self.admitted for p in self._answering(revision))

    def answering(self, revision: str) -> int:
        """Return the number of the revision's pods whose engines answer."""
        return len(self._answering(revision))

    def _answering(self, revision: str) -> list[ModelPod]:
        return [p for p in self.pods if p.revision == revision and p.ready and p.leaves_in is None]

    def _place(self) -> None:
        free = math.inf if self.places is None else self.places - sum(p.placed for p in self.pods)
        placed = []
        for p in self.pods:
            if not p.placed and free > 0:
                p, free = replace(p, placed=True), free - 1
            placed.append(replace(p, ready=self.starts and p.placed and p.starts_in == 0 and p.leaves_in is None))
        self.pods = tuple(placed)


def flows(
    requests: float, slow: float = 1.0, failing: float = 0.0, tokens: float = TOKENS, stopped: float = 0.9
) -> Flows:
    """Return the counters of a tick.

    Args:
        requests: number of requests.
        slow: factor on the usual duration of a request.
        failing: share of the requests that fail, 0 to 1.
        tokens: mean number of tokens of an answer.
        stopped: share of the answers that end by themselves, 0 to 1.
    """
    if not requests:
        return Flows()
    first, between = 0.4 * slow, 0.03 * slow
    return Flows(
        seconds=5.0,
        prompt_tokens=400 * requests,
        generation_tokens=tokens * requests,
        finished=requests,
        failed=failing * requests,
        stopped=stopped * (1 - failing) * requests,
        asked_tokens=4096 * requests,
        prefill_seconds=first * requests,
        decode_seconds=tokens * between * requests,
        ttft=_spread(requests, first, TTFT),
        itl=_spread(requests * tokens, between, ITL),
        generation_lengths=_spread(requests, tokens, LENGTHS),
    )


def _spread(count: float, mean: float, bounds: tuple[float, ...]) -> Histogram:
    """Distribute this many observations over the buckets, log-normally with a log standard deviation of 0.5."""
    law = NormalDist(math.log(mean) - 0.125, 0.5)
    below = [0.0, *(count * law.cdf(math.log(b)) for b in bounds), count]
    return Histogram(bounds, tuple(b - a for a, b in pairwise(below)), count * mean)
