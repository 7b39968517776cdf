"""Record request rates at which requests queued, and scale-ins (removals of replicas) that left too few replicas.

KV cache use says little about how much more load a replica can take. The rate at which requests arrive says more, and
users alone determine it. So when the policy relieves a queue, it records the best recent request rate of one replica.
Later it takes fewer replicas or a larger dtype only if each replica then gets fewer requests than that rate. If
replicas were too few within an hour of a scale-in, their number is not tried again for a day.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from kvpilot_operator.api.words import Action
from kvpilot_operator.decide.load.workload import Workload
from kvpilot_operator.state.status import MAX_SATURATIONS, Saturation, ScaleInBackoff
from kvpilot_operator.times import utc

# After requests have queued at some rate, load a replica with at most this share of that rate.
SHARE = 0.7
# A recorded rate applies only to requests whose mean lengths differ by at most this factor from the recorded ones.
_SIMILAR = 2.0
# If the service needs more capacity this soon after a scale-in, the scale-in counts as the cause.
SOON = timedelta(hours=1)
# Wait a day before the same scale-in, because most loads repeat daily.
HOLD = timedelta(days=1)


def learned(known: Sequence[Saturation], w: Workload, dtype: str) -> tuple[Saturation, ...]:
    """Add a record to `known`: the best recent requests per hour of one replica with this dtype under the load `w`.

    The new record replaces an earlier one of the dtype. But a surge never lowers a known rate, because requests may not
    queue yet. The uncached prompt tokens of a request are recorded only if the service has latency
    objectives, because only scale-ins of several replicas need them (`able`).
    """
    now, best = w.requests_per_second or 0.0, w.best_requests_per_second or 0.0
    rate, computed = (best, w.best_computed_prompt) if best > now else (now, w.computed_prompt)
    if not rate or not w.pods:
        return tuple(known)
    seen = Saturation(
        dtype=dtype,
        requests_per_hour=round(rate * 3600),
        mean_prompt=round(w.mean_prompt or 0),
        mean_generation=round(w.mean_generation or 0),
        computed_prompt=round(computed) if w.objectives and computed is not None else None,
        memory=(w.memory or None) if w.objectives else None,
    )
    before = next((k for k in known if k.dtype == dtype), None)
    if w.surge and before and _alike(before, seen):
        more = max(before, seen, key=lambda k: k.requests_per_hour)
        seen = msgspec.structs.replace(more, memory=seen.memory or before.memory)
    return (seen, *(k for k in known if k.dtype != dtype))[:MAX_SATURATIONS]


def beyond(known: Sequence[Saturation], w: Workload, serving: str, dtype: str, replicas: int) -> str | None:
    """Return the reason why `replicas` replicas of `dtype` are too few by the recorded request rate, or None."""
    limit = next((k for k in known if k.dtype == dtype and _alike(k, w)), None)
    if limit is None or w.requests_per_second is None:
        return None
    each = w.requests_per_second * 3600 * w.pods / max(1, replicas)
    refuted = dtype == serving and SHARE * w.requests_per_second * 3600 > limit.requests_per_hour
    if refuted or each <= SHARE * limit.requests_per_hour:
        return None
    return (
        f"each of {max(1, replicas)} replicas would get {each:.0f} requests an hour, but with {dtype} requests queued "
        f"at {limit.requests_per_hour} (the limit is {SHARE * 100:.0f}% of that)"
    )


def able(known: Sequence[Saturation], w: Workload, dtype: str) -> float | None:
    """Return the requests per second that one replica can handle, or None if unknown.

    This is the recorded rate at which requests queued, if those requests had similar lengths to the present ones and at
    least as many uncached prompt tokens.
    """
    lighter = (k for k in known if k.dtype == dtype and k.computed_prompt is not None and _alike(k, w, lighter=True))
    return next((k.requests_per_hour / 3600 for k in lighter), None)


def backoff(
    action: Action, dtype: str, replicas: int, now: datetime, scaled_in: datetime | None, known: ScaleInBackoff | None
) -> tuple[datetime | None, ScaleInBackoff | None]:
    """Return the new time of the last scale-in (`scaled_in`), and the new record of too few replicas (`known`).

    If `action` adds capacity soon after a scale-in, the present number of replicas is recorded as too few.
    """
    if action == Action.SCALE_IN:
        return now, known
    if action in (Action.SCALE_OUT, Action.DTYPE_DOWN) and scaled_in is not None and now - scaled_in <= SOON:
        return None, ScaleInBackoff(dtype=dtype, replicas=replicas, time=now)
    return scaled_in, known


def backing_off(now: datetime, dtype: str, replicas: int, known: ScaleInBackoff | None) -> str | None:
    """Return the reason why the service must not go down to `replicas` now, or None.

    The text stays the same until the wait ends.
    """
    if known is None or known.dtype != dtype or replicas > known.replicas or now >= known.time + HOLD:
        return None
    return f"{known.replicas} replicas of {dtype} were too few at {utc(known.time)}: they are not tried again for a day"


def _alike(limit: Saturation, w: Workload | Saturation, *, lighter: bool = False) -> bool:
    """Return True if `limit` and `w` have similar mean lengths of prompts, answers and uncached prompt tokens.

    With `lighter`, `w` may have any smaller number of uncached prompt tokens.
    """
    pairs = [(limit.mean_prompt, w.mean_prompt), (limit.mean_generation, w.mean_generation)]
    if limit.computed_prompt is not None:
        less = min(limit.computed_prompt, w.computed_prompt or 0.0) if lighter else limit.computed_prompt
        pairs.append((round(less), w.computed_prompt))
    return all(_SIMILAR * min(a, b) >= max(a, b) for a, b in ((float(a), b or 0.0) for a, b in pairs))
