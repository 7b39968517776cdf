"""Act on a user's request about one trial: the annotation kvpilot.io/canary of the service, VERB@REVISION/TIME.

TIME is the start of the trial, or its end for `retry`. A later trial has another time. So a request acts only once,
even if a GitOps tool applies it again and again. The operator never writes the annotation.
"""

import re
from datetime import datetime

import msgspec

from kvpilot_operator.api.names import CANARY_ANNOTATION
from kvpilot_operator.api.words import Action, Reason, Stage, Verdict
from kvpilot_operator.decide.context import Context, in_flight
from kvpilot_operator.decide.rollout.ending import ABORTED, roll_back
from kvpilot_operator.times import utc

_FORM = re.compile(r"(abort|deny|promote|retry)@[0-9a-f]{8}/\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def act(c: Context) -> Context:
    """Abort the canary, or lift the wait after the last trial, if a user asks for it. Report an unreadable request."""
    request, canary, last = c.snapshot.canary_annotation, c.canary, c.status.last_trial
    if request and _FORM.fullmatch(request) is None:
        remedy = "use VERB@REVISION/TIME, or `kubectl kvpilot abort`, `promote` or `retry`, which write it"
        return c.hold("RequestUnreadable", f"annotation {CANARY_ANNOTATION} is {request!r}: {remedy}")
    if canary is None:
        return _retry(c) if last is not None and _verb(c, last.revision, last.time) == "retry" else c
    verb, text = _verb(c, canary.revision, canary.started_time), f"ended by annotation {CANARY_ANNOTATION} ({request})"
    if verb not in ("abort", "deny") or canary.stage == Stage.ROLLING_BACK or c.snapshot.traffic == canary.revision:
        return c
    return roll_back(c, Verdict.FAILED if verb == "deny" else Verdict.INCONCLUSIVE, ABORTED, text)


def skips_steps(c: Context) -> bool:
    """Return True if the user asked to promote a probed canary without further steps, and it has not failed a step."""
    canary = in_flight(c)
    may = canary.stage != Stage.ROLLING_BACK and not canary.failures and c.plan.held is None
    return may and _verb(c, canary.revision, canary.started_time) == "promote"


def _verb(c: Context, revision: str, time: datetime) -> str:
    """Return the verb of a request about the trial with this revision and time; empty if it names another trial."""
    verb, _, trial = c.snapshot.canary_annotation.partition("@")
    return verb if trial == f"{revision}/{utc(time)}" else ""


def _retry(c: Context) -> Context:
    """Let the dtype and the revision of the last trial be tried at once."""
    last, *older = c.status.history
    standing, waits = c.denial(last.dtype), last.verdict != Verdict.PASSED and last.reason != Reason.SUPERSEDED
    if standing is None and not waits:
        return c
    c = c.set(history=(msgspec.structs.replace(last, reason=Reason.SUPERSEDED), *older)) if waits else c
    c = c.set_kv(denied=tuple(one for one in c.status.kv_cache.denied if one != standing))
    text = f"{last.dtype} may be tried again at once, by annotation {CANARY_ANNOTATION}; its last trial: {last.message}"
    return c.record(Action.JUDGE, "RetryAllowed", text, to_dtype=last.dtype)
