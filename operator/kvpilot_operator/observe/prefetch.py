"""Read the Job that downloads weights to a PersistentVolumeClaim: its status, its pods, and the bytes they report."""

import logging

from kvpilot_formats.untrusted import shown
from kvpilot_operator.api.names import IDENTITY_ANNOTATION, PREFETCH_CONTAINER, PREFETCH_LABEL, engine_url, prefetch_job
from kvpilot_operator.api.words import CachePhase
from kvpilot_operator.cluster.client import Cluster
from kvpilot_operator.cluster.objects import Ref
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe.informers import ServiceView
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.observe.series import SeriesReader
from kvpilot_operator.observe.views import Object, pod_view
from kvpilot_operator.render.prefetch import identity
from kvpilot_operator.state.objects import PodView, PrefetchView
from kvpilot_operator.state.snapshot import ServiceKey

log = logging.getLogger(__name__)

# Read at most this many pods. The Job has at most two, but a tenant may put its label on any number of pods.
_PODS = 2

_THERE = "kvpilot_prefetch_bytes"
_TOTAL = "kvpilot_prefetch_total_bytes"
_WANTED = frozenset((_THERE.encode(), _TOTAL.encode()))
# Limit of plausible bytes: an exbibyte is more than any PersistentVolumeClaim has.
_MOST = 2**60


class ProgressReader(SeriesReader[tuple[int, int]]):
    """A parser of the metrics page of the Job's pod. It raises ScrapeError if a series is missing."""

    def __init__(self) -> None:
        super().__init__(_WANTED)
        self._found: dict[str, int] = {}

    def add(self, name: str, _: str, value: float) -> None:
        """Add the value in bytes of one series. Raise ScrapeError if it is implausible."""
        if not 0 <= value <= _MOST:
            raise ScrapeError(f"{name} is {value}: not a number of bytes")
        self._found[name] = int(value)

    def result(self) -> tuple[int, int]:
        """Return the downloaded bytes, and the bytes of the whole model."""
        if len(self._found) < len(_WANTED):
            raise ScrapeError(f"{_THERE} or {_TOTAL} is not on the page: is this kvpilot-prefetch?")
        return min(self._found[_THERE], self._found[_TOTAL]), self._found[_TOTAL]


async def read_prefetch(
    cluster: Cluster, scraper: Scraper, key: ServiceKey, service: ServiceView
) -> PrefetchView | None:
    """Return the service's Job, or None. It is read, not watched, because few services download weights at a time."""
    name = prefetch_job(key.name)
    job = await cluster.find(Ref("batch/v1", "Job", key.namespace, name)) if _asked(key, service) else None
    if job is None or not any(one.get("uid") == service.uid for one in job["metadata"].get("ownerReferences") or ()):
        return None
    found = await cluster.first("v1", "Pod", key.namespace, f"{PREFETCH_LABEL}={key.name}", limit=_PODS)
    # Keep the Job's own pods that have not ended.
    uid = job["metadata"].get("uid")
    ours = (
        pod
        for pod in found
        if any(owner.get("uid") == uid for owner in pod["metadata"].get("ownerReferences") or ())
        and (pod.get("status") or {}).get("phase") not in ("Failed", "Succeeded")
    )
    pods = tuple(pod_view(pod, scraper.identity is not None, PREFETCH_CONTAINER) for pod in ours)
    progress = None
    for pod in pods:
        if pod.ready and pod.ip:
            try:
                progress = await scraper.read(key, engine_url(pod.ip, pod.mesh), ProgressReader())
            except ScrapeError as error:
                log.info("no progress of a prefetch: %s", error, extra={"service": str(key), "pod": pod.name})
    return prefetch_view(job, pods, progress)


def _asked(key: ServiceKey, service: ServiceView) -> bool:
    """Return True if the service needs a Job, or may have one that must be deleted."""
    spec, known = service.spec, service.status.cache
    if spec is None or not spec.cache.prefetch:
        return spec is not None and known is not None
    return known is None or (known.phase, known.identity) != (CachePhase.READY, identity(key.name, spec))


def prefetch_view(job: Object, pods: tuple[PodView, ...], progress: tuple[int, int] | None) -> PrefetchView:
    """Return the view of a Job with its pods. `progress` has the downloaded and the total bytes; None if unknown."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    ended = {one.get("type"): one for one in conditions if one.get("status") == "True"}
    failed, (there, total) = ended.get("Failed"), progress or (None, None)
    return PrefetchView(
        content=str((job["metadata"].get("annotations") or {}).get(IDENTITY_ANNOTATION, "")),
        done="Complete" in ended,
        failure=None
        if failed is None
        else shown(str(failed.get("message") or failed.get("reason") or "it failed"))[:1000],
        pods=pods,
        downloaded_bytes=there,
        total_bytes=total,
    )
