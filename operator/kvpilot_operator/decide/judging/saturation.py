"""How much could a replica do when it last had more to do than it could? What keeps a step back from being undone.

Use of the cache says little about how near a replica is to its limit: requests that are served faster hold their blocks
for a shorter time, so a second replica can take far more than half of the first one's use away. The rate of requests is
what stays the same whatever serves them. So whenever requests queue and a step is taken against it, the best rate that
a replica has finished lately is kept for its dtype, and a step back to that dtype, or to fewer replicas, waits for a
lower load.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpilot_operator.decide.judging.workload import Workload
from kvpilot_operator.state.status import MAX_SATURATIONS, Saturation

# A replica is loaded up to this share of the rate at which its requests queued.
_SHARE = 0.7
# The figure counts for requests whose mean lengths are within this factor of those it was seen with.
_SIMILAR = 2.0


def learned(known: Sequence[Saturation], w: Workload, dtype: str) -> tuple[Saturation, ...]:
    """What is known once `w` has been seen with its queue; unchanged where too little was seen."""
    rate = max(w.requests_per_second or 0.0, w.best_requests_per_second or 0.0)
    if not rate or not w.pods:
        return tuple(known)
    seen = Saturation(
        dtype=dtype,
        requests_per_hour=round(rate * 3600),
        mean_prompt=round(w.mean_prompt or 0),
        mean_generation=round(w.mean_generation or 0),
    )
    return (seen, *(k for k in known if k.dtype != dtype))[:MAX_SATURATIONS]


def beyond(known: Sequence[Saturation], w: Workload, serving: str, dtype: str, replicas: int) -> str | None:
    """Why so many replicas of this dtype would have too much to do again, or None.

    A calm replica that clearly does more than that shows that something else was in the way then.
    """
    limit = next((k for k in known if k.dtype == dtype), None)
    if limit is None or w.requests_per_second is None or not _alike(limit, w):
        return None
    each = w.requests_per_second * 3600 * w.pods / max(1, replicas)
    refuted = dtype == serving and _SHARE * w.requests_per_second * 3600 > limit.requests_per_hour
    if refuted or each <= _SHARE * limit.requests_per_hour:
        return None
    return (
        f"{each:.0f} requests an hour for each of {max(1, replicas)} replicas, and they queued at "
        f"{limit.requests_per_hour} with {dtype} ({_SHARE * 100:.0f}% of that is the limit)"
    )


def _alike(limit: Saturation, w: Workload) -> bool:
    pairs = ((limit.mean_prompt, w.mean_prompt), (limit.mean_generation, w.mean_generation))
    return all(_SIMILAR * min(a, b) >= max(a, b) for a, b in ((float(a), b or 0.0) for a, b in pairs))
