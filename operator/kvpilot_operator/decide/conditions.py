"""What does the user read? The conditions of a service, each with its reason and numbers; `Ready` sums them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

from kvpilot_kernels import formats
from kvpilot_operator.decide.accuracy.drift import REASON as DRIFTED
from kvpilot_operator.decide.accuracy.drift import drifted
from kvpilot_operator.decide.context import Context
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.judging import factors
from kvpilot_operator.decide.judging.workload import USAGE_STEP_PERCENT
from kvpilot_operator.decide.questions import CONDITION, line
from kvpilot_operator.decide.rejections import finding, rejected
from kvpilot_operator.decide.trial import traffic
from kvpilot_operator.decide.trial.baseline import known
from kvpilot_operator.decide.trial.refusal import engine_failure, pending_reason
from kvpilot_operator.decide.trial.rollout import start_fault
from kvpilot_operator.render.names import deployment_name
from kvpilot_operator.state.enums import Stage, TrafficMode, Verdict, WorkloadKind
from kvpilot_operator.state.questions import keeps_probe
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Canary, Condition, clip

_Word = Literal["True", "False", "Unknown"]
_WAYS = {TrafficMode.HTTP_ROUTE: " by HTTPRoute", TrafficMode.REPLICA_RATIO: " by replica ratio"}

D = TypeVar("D", bound=Draft)


class Line(NamedTuple):
    """A condition before it has its times."""

    type: str
    status: _Word
    reason: str
    message: str


def tell(c: Context) -> Context:
    """All conditions of a service whose spec is accepted; an event where objects are refused anew."""
    objects = _objects_accepted(c.snapshot)
    available, calibration = _available(c, objects), _calibration(c)
    lines = [
        _ready(c, available, objects, calibration),
        available,
        _progressing(c, objects),
        _model_cached(c),
        _metrics(c),
        _memory_pressured(c),
        _canary_healthy(c),
        _accuracy(c),
        calibration,
        _spec_accepted(c, objects),
        objects,
    ]
    c = c.set(conditions=_stamped(c.snapshot, lines))
    return _announce(_announce(c, "ObjectsAccepted", objects.reason), "CalibrationConsistent", calibration.reason)


def refuse(draft: Draft) -> Draft:
    """The conditions of a service whose spec breaks the rules: what runs is left as it is."""
    s = draft.snapshot
    message = clip("; ".join(f"{fault.field}: {fault.message}" for fault in s.faults))
    kept = [
        Line(one.type, one.status, one.reason, one.message)
        for one in s.status.conditions
        if one.type not in ("Ready", "SpecAccepted")
    ]
    serving = any(pod.ready for pod in s.pods)
    suffix = " (the last accepted spec keeps serving)" if serving else ""
    ready = Line("Ready", "False", "SpecInvalid", message + suffix)
    lines = [ready, *kept, Line("SpecAccepted", "False", "Invalid", message)]
    return _announce(draft.set(conditions=_stamped(s, lines)), "SpecAccepted", "SpecInvalid")


def report(draft: D) -> D:
    """Say which questions had no answer; what a running probe has found so far stays said."""
    found = {one.type: one for one in draft.status.conditions if one.type != CONDITION}
    if keeps_probe(draft.unanswered):
        accuracy = draft.before.condition("AccuracyVerified")
        found |= {accuracy.type: accuracy} if accuracy is not None else {}
    answered = Line(CONDITION, *line(draft.unanswered))
    return draft.set(conditions=(*found.values(), *_stamped(draft.snapshot, [answered])))


def _announce(draft: D, kind: str, reason: str) -> D:
    """Post an event where a condition has become False, or says something else."""
    before, after = draft.before.condition(kind), draft.status.condition(kind)
    if after is None or after.status != "False" or (before is not None and before.message == after.message):
        return draft
    return draft.event(reason, after.message, warning=True)


def _stamped(s: Snapshot, lines: Sequence[Line]) -> tuple[Condition, ...]:
    """Conditions with `lastTransitionTime` moved only where the status word changed."""
    result = []
    for one in lines:
        before = s.status.condition(one.type)
        kept = before is not None and before.status == one.status
        result.append(
            Condition(
                type=one.type,
                status=one.status,
                reason=one.reason,
                message=clip(one.message),
                last_transition_time=before.last_transition_time if before is not None and kept else s.now,
                observed_generation=s.generation,
            )
        )
    return tuple(result)


def _objects_accepted(s: Snapshot) -> Line:
    """What of the service's objects and pods the API server will not have, with the spec's field and the remedy."""
    refused = rejected(s)
    if refused:
        found = finding(refused)
        return Line("ObjectsAccepted", "False", found.reason, found.message)
    before = s.status.condition("ObjectsAccepted")
    if s.rejections is None and before is not None:
        # Nothing was written yet in this life of the operator: what was refused before most likely still is.
        return Line("ObjectsAccepted", before.status, before.reason, before.message)
    if s.rejections is None:
        return Line("ObjectsAccepted", "Unknown", "NotWrittenYet", "no object has been written yet")
    return Line("ObjectsAccepted", "True", "Written", "the API server has taken every object")


def _ready(c: Context, available: Line, objects: Line, calibration: Line) -> Line:
    stable, canary = c.stable, c.canary
    if available.status != "True" or stable is None:
        return available._replace(type="Ready", status="False")
    but = "; not all is as the spec asks, see ObjectsAccepted" if objects.status == "False" else ""
    but += "; its engines do not all quantize alike, see CalibrationConsistent" if calibration.status == "False" else ""
    if canary is not None:
        return Line(
            "Ready",
            "True",
            f"Canary{canary.stage}",
            f"{stable.dtype} serves; {canary.dtype} is on trial{_share(canary)}{but}",
        )
    return Line("Ready", "True", "Serving", f"{stable.dtype} serves{but}")


def _available(c: Context, objects: Line) -> Line:
    """Whether engines answer, behind a Service of ours that selects them.

    Their endpoints follow from that and are not watched: each EndpointSlice is written again whenever a pod becomes
    ready or not, which the pods tell already.
    """
    s, replicas = c.snapshot, c.replicas
    if c.stable is None:
        return Line("Available", "False", "NoRevision", "nothing serves yet")
    serving = traffic.serving(c)
    pods = [pod for revision in serving for pod in s.pods_of(revision)]
    ready = sum(len(s.ready_pods(revision)) for revision in serving)
    if ready and ready >= min(replicas, 1) and s.traffic is None:
        return _unserved(s, ready)
    if ready and ready >= min(replicas, 1):
        return Line("Available", "True", "EnginesReady", f"{ready} of {max(replicas, len(pods))} replicas answer")
    if replicas == 0:
        return Line("Available", "False", "ScaledToZero", "spec.replicas is 0")
    why = engine_failure(pods) or pending_reason(pods)
    if why is not None:
        return Line("Available", "False", why.reason, why.message)
    names = [("Service", s.key.name), *(("Deployment", deployment_name(s.key.name, one)) for one in serving)]
    blocking = [one for one in rejected(s) if (one.kind, one.name) in names]
    if blocking:
        found = finding(blocking)
        return Line("Available", "False", found.reason, found.message)
    if s.rejections is None and objects.status == "False":
        return objects._replace(type="Available")
    return Line("Available", "False", "EnginesStarting", f"0 of {replicas} replicas answer yet")


def _unserved(s: Snapshot, ready: int) -> Line:
    """Engines answer, and no Service of ours sends them anything."""
    refused = s.rejection("Service", s.key.name)
    if refused is not None:
        found = finding([refused])
        return Line("Available", "False", found.reason, found.message)
    text = f"{ready} replicas answer, and no Service {s.key.name} of kvpilot's selects them: it is written now"
    return Line("Available", "False", "NoService", text)


def _progressing(c: Context, objects: Line) -> Line:
    canary, stable, target, paused = c.canary, c.stable, c.target, c.spec.rollout.paused
    if canary is not None:
        stopped = paused and canary.stage != Stage.ROLLING_BACK
        return Line(
            "Progressing",
            "False" if stopped else "True",
            "RolloutPaused" if stopped else f"Canary{canary.stage}",
            f"{canary.from_dtype} -> {canary.dtype}{_share(canary)}: {canary.message}",
        )
    if target.held is not None:
        return Line("Progressing", "False", target.reason, target.held)
    if stable is not None and stable.ever_ready and target.revision != stable.revision:
        fault = start_fault(c, target)
        if fault is not None:
            return Line("Progressing", "False", fault.reason, fault.message)
        if paused:
            text = f"spec.rollout.paused is true: no canary for {target.dtype} is started ({target.message})"
            return Line("Progressing", "False", "RolloutPaused", text)
    if objects.status == "False":
        return objects._replace(type="Progressing")
    if stable is not None and not stable.ever_ready:
        starting = f"revision {stable.revision} ({stable.dtype}) is starting"
        return Line("Progressing", "True", "EnginesStarting", starting)
    return Line("Progressing", "False", "Settled", target.message)


def _share(canary: Canary) -> str:
    """How much of the traffic the canary has, and how it gets it."""
    if canary.stage not in (Stage.SHIFTING, Stage.PROMOTING) or canary.weight_percent is None:
        return ""
    way = _WAYS.get(canary.traffic_mode, "") if canary.traffic_mode is not None else ""
    return f", at {canary.weight_percent}% of the traffic{way}"


def _model_cached(c: Context) -> Line:
    stable = c.stable
    if stable is not None and stable.ever_ready:
        return Line("ModelCached", "True", "EngineLoadedIt", "an engine has loaded the model")
    failure = engine_failure(c.snapshot.pods_of(stable.revision)) if stable is not None else None
    if failure is not None and failure.reason in ("ModelNotFound", "ModelUnsupported"):
        return Line("ModelCached", "False", failure.reason, failure.message)
    return Line("ModelCached", "Unknown", "NotLoadedYet", "no engine has loaded the model yet")


def _metrics(c: Context) -> Line:
    workload, backed_off = c.workload, c.snapshot.backed_off
    less = ""
    if backed_off:
        first, number = min(backed_off), len(backed_off)
        many = "1 pod is" if number == 1 else f"{number} pods are"
        less = f"; {many} scraped less often; {first}: {backed_off[first]}"
    if workload.kind == WorkloadKind.NO_METRICS:
        return Line("MetricsAvailable", "False", "NoMetrics", f"{workload.message}{less}")
    capacity = f"KV capacity {workload.capacity_tokens} tokens"
    if workload.doubted:  # names alone: why holds figures that move, and is in the operator's log
        names = ", ".join(sorted(doubt.partition(":")[0] for doubt in workload.doubted))
        return Line("MetricsAvailable", "True", "PartlyBelieved", f"{capacity}; not believed: {names}{less}")
    return Line("MetricsAvailable", "True", "Scraped", f"{capacity}{less}")


def _memory_pressured(c: Context) -> Line:
    workload, before, usage = c.workload, c.before.condition("MemoryPressured"), c.before.kv_cache.usage_percent
    if workload.kind == WorkloadKind.NO_METRICS:
        return Line("MemoryPressured", "Unknown", "NoMetrics", workload.message)
    held = workload.kind == WorkloadKind.WARMING and before is not None and before.status == "True"
    word: _Word = "True" if workload.kind == WorkloadKind.MEMORY_BOUND or held else "False"
    same = before is not None and (before.status, before.reason) == (word, workload.kind)
    if before is not None and same and usage is not None and abs(usage - workload.usage_percent) < USAGE_STEP_PERCENT:
        return Line("MemoryPressured", word, workload.kind, before.message)  # no write for figures that hardly moved
    return Line("MemoryPressured", word, workload.kind, workload.message)


def _canary_healthy(c: Context) -> Line:
    canary, last = c.canary, c.status.last_canary
    if canary is not None:
        passed: _Word = "True" if canary.verdict == Verdict.PASSED else "Unknown"
        word: _Word = "False" if canary.stage == Stage.ROLLING_BACK else passed
        return Line("CanaryHealthy", word, canary.reason or canary.stage, f"{canary.dtype}: {canary.message}")
    if last is None:
        return Line("CanaryHealthy", "Unknown", "NoCanary", "no canary has run")
    ended: _Word = "True" if last.stage == Stage.PROMOTED else "False"
    return Line("CanaryHealthy", ended, last.reason or last.stage, f"{last.stage} {last.dtype}: {last.message}")


def _accuracy(c: Context) -> Line:
    stable, accuracy, spec = c.stable, c.status.accuracy, c.spec
    if c.snapshot.probes.fault is not None:
        return Line("AccuracyVerified", "False", "ProbeSetInvalid", c.snapshot.probes.fault)
    if stable is None:
        return Line("AccuracyVerified", "Unknown", "NoRevision", "nothing serves yet")
    if stable.dtype == spec.kv_cache.baseline:
        return Line("AccuracyVerified", "True", "Reference", f"{stable.dtype} is what accuracy is measured against")
    last, runs = accuracy.last, f"of {spec.accuracy.failure_limit} runs in a row failed"
    if last is None or last.revision != stable.revision:
        found = f"{stable.dtype} has not been compared with a 16-bit engine"
    else:
        found = (
            f"{last.dtype}{f' on pod {last.pod}' if last.pod else ''}: excess KL "
            f"{last.excess_kl_micronats / 1000:.1f} millinats, top-1 agreement {last.top1_agreement_permille / 10:.1f}%"
        )
    if drifted(c):
        return Line("AccuracyVerified", "False", DRIFTED, f"{found}; {accuracy.failures} runs in a row failed")
    if accuracy.errors >= spec.accuracy.consecutive_error_limit:
        # Not the number: it grows with every run, and nobody is helped by a new message each time.
        return Line(
            "AccuracyVerified", "Unknown", "ProbeErrors", f"the last runs brought no verdict (see events); {found}"
        )
    if last is None or last.revision != stable.revision:
        return Line("AccuracyVerified", "Unknown", "NotProbed", found)
    if accuracy.failures:
        return Line("AccuracyVerified", "Unknown", "ProbeFailed", f"{found}; {accuracy.failures} {runs}")
    if known(c) is None:
        unwatched = "no 16-bit reference is kept for the present model and probe sets, the next canary captures one"
        return Line("AccuracyVerified", "Unknown", "NotWatched", f"{found}; not watched since: {unwatched}")
    word: _Word = "True" if last.verdict == Verdict.PASSED else "False"
    return Line("AccuracyVerified", word, f"Probe{last.verdict}", found)


def _calibration(c: Context) -> Line:
    """Whether the engines that serve, and those on trial, have the factors of their revision."""
    s, stable, kind = c.snapshot, c.stable, "CalibrationConsistent"
    sides = [part.revision for part in (stable, c.canary) if part is not None]
    found = [text for revision in sides if (text := factors.mixed(s, revision)) is not None]
    if found:
        return Line(kind, "False", factors.REASON, "; ".join(found))
    sample = s.last_sample(stable.revision) if stable is not None else None
    if stable is not None and not formats.parse(stable.dtype).ours:
        return Line(kind, "True", "NotCalibrated", f"{stable.dtype} has no calibration factors")
    if sample is None or not sample.factors:
        return Line(kind, "Unknown", "NotReported", "no engine has told its calibration factors yet")
    return Line(kind, "True", "SameFactors", f"all engines have the calibration factors {sample.factors}")


def _spec_accepted(c: Context, objects: Line) -> Line:
    note = _window_note(c)
    if not c.snapshot.server.pod_disruption_budgets:
        note = "this API server does not serve policy/v1: no PodDisruptionBudget is kept"
    if objects.status == "False":
        note = "the spec is valid, and not all that it asks for could be written: see ObjectsAccepted"
    if note is not None:
        return Line("SpecAccepted", "True", "PartlyActedOn", note)
    return Line("SpecAccepted", "True", "Accepted", "every field that is set is acted on")


def _window_note(c: Context) -> str | None:
    """What is to be known where the engines that the spec asks for serve another recent window than it asks for."""
    sample = c.snapshot.last_sample(c.stable.revision) if c.stable is not None else None
    if c.stable is None or sample is None or c.stable.revision != c.target.revision:
        return None
    asked = c.spec.kv_cache.recent_tokens_of(c.stable.dtype)
    if asked is None or sample.recent_tokens in (None, asked):
        return None
    return (
        f"spec.kvCache.recentTokens is {asked}, and the engines read the last {sample.recent_tokens} tokens at 8 bits; "
        "kvpilot_recent_window_info of an engine says why: use an image with a vLLM that can, or set what it serves"
    )
