"""A person's request about one trial: the annotation kvpilot.io/canary of the service, VERB@REVISION/TIME.

TIME is the start of the trial, or its end for `retry`. A later trial has another time, so a request acts once, however
often a GitOps tool applies it again. The operator never writes the annotation.
"""

import re

import msgspec

from kvpilot_operator.api.names import CANARY_ANNOTATION
from kvpilot_operator.api.words import Action, Reason, Stage, Verdict
from kvpilot_operator.decide.context import Context, in_flight
from kvpilot_operator.decide.rollout.ending import ABORTED, roll_back
from kvpilot_operator.state.status import Canary
from kvpilot_operator.times import utc

_FORM = re.compile(r"(abort|deny|promote|retry)@[0-9a-f]{8}/\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def act(c: Context) -> Context:
    """Abort the canary, or lift the wait after the last trial. Report a request that cannot be read, once."""
    asked, canary, last = c.snapshot.request, c.canary, c.status.last_trial
    if asked and _FORM.fullmatch(asked) is None:
        remedy = "use VERB@REVISION/TIME, or `kubectl kvpilot abort`, `promote` or `retry`, which write it"
        return c.hold("RequestUnreadable", f"annotation {CANARY_ANNOTATION} is {asked!r}: {remedy}")
    if canary is None:
        due = last is not None and asked == f"retry@{last.revision}/{utc(last.time)}"
        return _retry(c) if due else c
    if canary.stage == Stage.ROLLING_BACK or c.snapshot.traffic == canary.revision:
        return c
    verdicts = {f"abort@{_trial(canary)}": Verdict.INCONCLUSIVE, f"deny@{_trial(canary)}": Verdict.FAILED}
    verdict = verdicts.get(asked)
    return (
        c if verdict is None else roll_back(c, verdict, ABORTED, f"ended by annotation {CANARY_ANNOTATION} ({asked})")
    )


def skips_steps(c: Context) -> bool:
    """Return True if a probed canary may skip the rest of its traffic steps. One that has failed a step may not."""
    canary = in_flight(c)
    if canary.stage == Stage.ROLLING_BACK or canary.failures or c.plan.held is not None:
        return False
    return c.snapshot.request == f"promote@{_trial(canary)}"


def _trial(canary: Canary) -> str:
    return f"{canary.revision}/{utc(canary.started_time)}"


def _retry(c: Context) -> Context:
    """Let the dtype and the revision of the last trial be tried at once."""
    last, *older = c.status.history
    standing, passed = c.denial(last.dtype), last.verdict == Verdict.PASSED
    if standing is None and (passed or last.reason == Reason.SUPERSEDED):
        return c
    if not passed:
        c = c.set(history=(msgspec.structs.replace(last, reason=Reason.SUPERSEDED), *older))
    c = c.set_kv(denied=tuple(one for one in c.status.kv_cache.denied if one != standing))
    text = f"{last.dtype} may be tried again at once, by annotation {CANARY_ANNOTATION}; before: {last.message}"
    return c.record(Action.JUDGE, "RetryAllowed", text, to_dtype=last.dtype)
