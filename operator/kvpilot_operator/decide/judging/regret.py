"""Was the last replica given back too early? A number of replicas that was too few is not tried again for a day.

Use of the cache cannot foretell it: what the prefix cache holds beyond running requests does not count as use, and a
service that loses its prefixes computes every prompt anew.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from kvpilot_operator.state.status import Regret

# Relief that is called for so soon after a replica was given back is taken as its consequence.
SOON = timedelta(hours=1)
# As long as the rhythm that most loads have.
HOLD = timedelta(days=1)

_RELIEF = ("ScaleOut", "DtypeDown")


def remembered(
    action: str, dtype: str, replicas: int, now: datetime, scaled_in: datetime | None, regret: Regret | None
) -> tuple[datetime | None, Regret | None]:
    """When a replica was last given back, and what was last regretted, once `action` is taken with so many replicas."""
    if action == "ScaleIn":
        return now, regret
    if action in _RELIEF and scaled_in is not None and now - scaled_in <= SOON:
        return None, Regret(dtype=dtype, replicas=replicas, time=now)
    return scaled_in, regret


def held(now: datetime, dtype: str, replicas: int, regret: Regret | None) -> str | None:
    """Why this few replicas of this dtype are not tried now, without figures that move; None where they may be."""
    if regret is None or regret.dtype != dtype or replicas > regret.replicas or now >= regret.time + HOLD:
        return None
    return (
        f"{regret.replicas} replicas of {dtype} were too few at {regret.time:%Y-%m-%dT%H:%M:%SZ}: they are not tried "
        "again for a day"
    )
