"""Which pods may be sent requests? Those of the revision that serves, and of a canary that has passed its probes.

A pod's readiness gate (docs/decisions/0030) keeps it out of everything that selects pods, whoever wrote the selector:
our Services, a user's Service or InferencePool, a mesh. So it is opened only after the status has said that the
revision may serve, and derived anew from the status in every reconcile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from kvpilot_operator.api.words import Stage
from kvpilot_operator.decide.context import Context, Draft
from kvpilot_operator.decide.objects import traffic
from kvpilot_operator.state.objects import PodView

D = TypeVar("D", bound=Draft)

_SENT_REQUESTS = (Stage.SHIFTING, Stage.PROMOTING)


def admit(c: Context) -> Context:
    """The readiness gates that have to be opened or closed, by pod."""
    if c.stable is None:
        return c
    wanted = [(pod, _wanted(c, pod)) for pod in c.snapshot.pods if pod.admitted is not None and not pod.terminating]
    return replace(c, gates={pod.name: open_ for pod, open_ in wanted if open_ not in (None, pod.admitted)})


def admit_serving(draft: D) -> D:
    """Open the gates of revisions that get requests already, and close none: for a service that is left as it is."""
    s, stable, canary = draft.snapshot, draft.stable, draft.canary
    serving = {s.traffic}
    if stable is not None:
        serving.add(stable.revision)
    if canary is not None and canary.stage in _SENT_REQUESTS:
        serving.add(canary.revision)
    pods = (pod for pod in s.pods if pod.admitted is False and not pod.terminating)
    return replace(draft, gates={pod.name: True for pod in pods if pod.revision in serving})


def _wanted(c: Context, pod: PodView) -> bool | None:
    """Whether the pod's gate is to be open; None leaves it as it is."""
    if c.stable is not None and pod.revision == c.stable.revision:
        return True
    canary = c.canary
    if canary is None or pod.revision != canary.revision:
        return None
    if canary.stage == Stage.ROLLING_BACK and traffic.selected(c) == traffic.EVERY_REVISION:
        return None  # Its pods are needed until stable ones have taken over; no further one is admitted.
    return canary.stage in _SENT_REQUESTS
