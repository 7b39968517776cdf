"""What does the user read? The conditions of a service, each with its reason and numbers; `Ready` sums them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvpilot_kernels import formats
from kvpilot_operator.api.schema import Fault
from kvpilot_operator.decide.accuracy.drift import REASON as DRIFTED
from kvpilot_operator.decide.accuracy.drift import drifted
from kvpilot_operator.decide.baseline import known
from kvpilot_operator.decide.draft import Draft
from kvpilot_operator.decide.judging import factors
from kvpilot_operator.decide.judging.workload import USAGE_STEP_PERCENT, Workload
from kvpilot_operator.decide.rejections import finding, rejected
from kvpilot_operator.decide.target import Target
from kvpilot_operator.decide.trial import traffic
from kvpilot_operator.decide.trial.refusal import engine_failure, pending_reason
from kvpilot_operator.decide.trial.rollout import start_fault
from kvpilot_operator.render.names import deployment_name
from kvpilot_operator.state.snapshot import Snapshot
from kvpilot_operator.state.status import Canary, Condition, clip

_Word = Literal["True", "False", "Unknown"]
_Line = tuple[str, _Word, str, str]


def conditions(draft: Draft, s: Snapshot, target: Target, workload: Workload, replicas: int) -> tuple[Condition, ...]:
    """All conditions of a service whose spec is accepted."""
    objects = _objects_accepted(s)
    available, calibration = _available(draft, s, replicas, objects), _calibration(draft, s)
    lines = [
        available,
        _progressing(draft, s, target, replicas, objects),
        _model_cached(draft, s),
        _metrics(s, workload),
        _memory_pressured(s, workload),
        _canary_healthy(draft),
        _accuracy(draft, s, target),
        calibration,
        _spec_accepted(draft, s, target, objects),
        objects,
    ]
    return stamped(s, [_ready(available, draft, objects, calibration), *lines])


def refused(s: Snapshot, faults: Sequence[Fault]) -> tuple[Condition, ...]:
    """The conditions of a service whose spec breaks the rules: what runs is left as it is."""
    message = clip("; ".join(f"{fault.field}: {fault.message}" for fault in faults))
    kept: list[_Line] = [
        (c.type, c.status, c.reason, c.message) for c in s.status.conditions if c.type not in ("Ready", "SpecAccepted")
    ]
    serving = any(pod.ready for pod in s.pods)
    suffix = " (the last accepted spec keeps serving)" if serving else ""
    return stamped(
        s, [("Ready", "False", "SpecInvalid", message + suffix), *kept, ("SpecAccepted", "False", "Invalid", message)]
    )


def stamped(s: Snapshot, lines: Sequence[_Line]) -> tuple[Condition, ...]:
    """Conditions with `lastTransitionTime` moved only where the status word changed."""
    result = []
    for kind, word, reason, message in lines:
        before = s.status.condition(kind)
        moved = before is None or before.status != word
        result.append(
            Condition(
                type=kind,
                status=word,
                reason=reason,
                message=clip(message),
                last_transition_time=s.now if moved or before is None else before.last_transition_time,
                observed_generation=s.generation,
            )
        )
    return tuple(result)


def _objects_accepted(s: Snapshot) -> _Line:
    """What of the service's objects and pods the API server will not have, with the spec's field and the remedy."""
    refused = rejected(s)
    if refused:
        found = finding(refused)
        return ("ObjectsAccepted", "False", found.reason, found.message)
    before = s.status.condition("ObjectsAccepted")
    if s.rejections is None and before is not None:
        # Nothing was written yet in this life of the operator: what was refused before most likely still is.
        return ("ObjectsAccepted", before.status, before.reason, before.message)
    if s.rejections is None:
        return ("ObjectsAccepted", "Unknown", "NotWrittenYet", "no object has been written yet")
    return ("ObjectsAccepted", "True", "Written", "the API server has taken every object")


def _ready(available: _Line, draft: Draft, objects: _Line, calibration: _Line) -> _Line:
    _, word, reason, message = available
    stable = draft.status.stable
    if word != "True" or stable is None:
        return ("Ready", "False", reason, message)
    canary = draft.status.canary
    but = "; not all is as the spec asks, see ObjectsAccepted" if objects[1] == "False" else ""
    but += "; its engines do not all quantize alike, see CalibrationConsistent" if calibration[1] == "False" else ""
    if canary is not None:
        return (
            "Ready",
            "True",
            f"Canary{canary.stage}",
            f"{stable.dtype} serves; {canary.dtype} is on trial{_share(canary)}{but}",
        )
    return ("Ready", "True", "Serving", f"{stable.dtype} serves{but}")


def _available(draft: Draft, s: Snapshot, replicas: int, objects: _Line) -> _Line:
    """Whether engines answer, behind a Service of ours that selects them.

    Their endpoints follow from that and are not watched: each EndpointSlice is written again whenever a pod becomes
    ready or not, which the pods tell already.
    """
    stable = draft.status.stable
    if stable is None:
        return ("Available", "False", "NoRevision", "nothing serves yet")
    serving = traffic.serving(s, draft.status)
    pods = [pod for revision in serving for pod in s.pods_of(revision)]
    ready = sum(len(s.ready_pods(revision)) for revision in serving)
    if ready and ready >= min(replicas, 1) and s.traffic is None:
        return _unserved(s, ready)
    if ready and ready >= min(replicas, 1):
        return ("Available", "True", "EnginesReady", f"{ready} of {max(replicas, len(pods))} replicas answer")
    if replicas == 0:
        return ("Available", "False", "ScaledToZero", "spec.replicas is 0")
    why = engine_failure(pods) or pending_reason(pods)
    if why is not None:
        return ("Available", "False", why.reason, why.message)
    names = [("Service", s.key.name), *(("Deployment", deployment_name(s.key.name, one)) for one in serving)]
    blocking = [one for one in rejected(s) if (one.kind, one.name) in names]
    if blocking:
        found = finding(blocking)
        return ("Available", "False", found.reason, found.message)
    if s.rejections is None and objects[1] == "False":
        return ("Available", "False", objects[2], objects[3])
    return ("Available", "False", "EnginesStarting", f"0 of {replicas} replicas answer yet")


def _unserved(s: Snapshot, ready: int) -> _Line:
    """Engines answer, and no Service of ours sends them anything."""
    refused = s.rejection("Service", s.key.name)
    if refused is not None:
        found = finding([refused])
        return ("Available", "False", found.reason, found.message)
    text = f"{ready} replicas answer, and no Service {s.key.name} of kvpilot's selects them: it is written now"
    return ("Available", "False", "NoService", text)


def _progressing(draft: Draft, s: Snapshot, target: Target, replicas: int, objects: _Line) -> _Line:
    canary, stable = draft.status.canary, draft.status.stable
    if canary is not None:
        stopped = s.spec is not None and s.spec.rollout.paused and canary.stage != "RollingBack"
        return (
            "Progressing",
            "False" if stopped else "True",
            "RolloutPaused" if stopped else f"Canary{canary.stage}",
            f"{canary.from_dtype} -> {canary.dtype}{_share(canary)}: {canary.message}",
        )
    if target.held is not None:
        return ("Progressing", "False", target.reason, target.held)
    if s.spec is not None and stable is not None and stable.ever_ready and target.revision != stable.revision:
        fault = start_fault(s, s.spec, target, replicas)
        if fault is not None:
            return ("Progressing", "False", fault.reason, fault.message)
        if s.spec.rollout.paused:
            text = f"spec.rollout.paused is true: no canary for {target.dtype} is started ({target.message})"
            return ("Progressing", "False", "RolloutPaused", text)
    if objects[1] == "False":
        return ("Progressing", "False", objects[2], objects[3])
    if stable is not None and not stable.ever_ready:
        return ("Progressing", "True", "EnginesStarting", f"revision {stable.revision} ({stable.dtype}) is starting")
    return ("Progressing", "False", "Settled", target.message)


def _share(canary: Canary) -> str:
    """How much of the traffic the canary has, and how it gets it."""
    if canary.stage not in ("Shifting", "Promoting") or canary.weight_percent is None:
        return ""
    way = {"HTTPRoute": " by HTTPRoute", "ReplicaRatio": " by replica ratio"}.get(canary.traffic_mode or "", "")
    return f", at {canary.weight_percent}% of the traffic{way}"


def _model_cached(draft: Draft, s: Snapshot) -> _Line:
    stable = draft.status.stable
    if stable is not None and stable.ever_ready:
        return ("ModelCached", "True", "EngineLoadedIt", "an engine has loaded the model")
    failure = engine_failure(s.pods_of(stable.revision)) if stable is not None else None
    if failure is not None and failure.reason in ("ModelNotFound", "ModelUnsupported"):
        return ("ModelCached", "False", failure.reason, failure.message)
    return ("ModelCached", "Unknown", "NotLoadedYet", "no engine has loaded the model yet")


def _metrics(s: Snapshot, workload: Workload) -> _Line:
    refused = ""
    if s.backed_off:
        first, number = min(s.backed_off), len(s.backed_off)
        many = "1 pod is" if number == 1 else f"{number} pods are"
        refused = f"; {many} scraped less often; {first}: {s.backed_off[first]}"
    if workload.kind == "NoMetrics":
        return ("MetricsAvailable", "False", "NoMetrics", f"{workload.message}{refused}")
    capacity = f"KV capacity {workload.capacity_tokens} tokens"
    if workload.doubted:  # names alone: why holds figures that move, and is in the operator's log
        names = ", ".join(sorted(doubt.partition(":")[0] for doubt in workload.doubted))
        return ("MetricsAvailable", "True", "PartlyBelieved", f"{capacity}; not believed: {names}{refused}")
    return ("MetricsAvailable", "True", "Scraped", f"{capacity}{refused}")


def _memory_pressured(s: Snapshot, workload: Workload) -> _Line:
    if workload.kind == "NoMetrics":
        return ("MemoryPressured", "Unknown", "NoMetrics", workload.message)
    before = s.status.condition("MemoryPressured")
    held = workload.kind == "Warming" and before is not None and before.status == "True"
    word: _Word = "True" if workload.kind == "MemoryBound" or held else "False"
    usage = s.status.kv_cache.usage_percent
    same = before is not None and (before.status, before.reason) == (word, workload.kind)
    if before is not None and same and usage is not None and abs(usage - workload.usage_percent) < USAGE_STEP_PERCENT:
        return ("MemoryPressured", word, workload.kind, before.message)  # no write for figures that hardly moved
    return ("MemoryPressured", word, workload.kind, workload.message)


def _canary_healthy(draft: Draft) -> _Line:
    canary = draft.status.canary
    if canary is not None:
        word: _Word = "False" if canary.stage == "RollingBack" else "True" if canary.verdict == "Passed" else "Unknown"
        return ("CanaryHealthy", word, canary.reason or canary.stage, f"{canary.dtype}: {canary.message}")
    last = draft.status.last_canary
    if last is None:
        return ("CanaryHealthy", "Unknown", "NoCanary", "no canary has run")
    ended: _Word = "True" if last.stage == "Promoted" else "False"
    return ("CanaryHealthy", ended, last.reason or last.stage, f"{last.stage} {last.dtype}: {last.message}")


def _accuracy(draft: Draft, s: Snapshot, target: Target) -> _Line:
    if s.probes.fault is not None:
        return ("AccuracyVerified", "False", "ProbeSetInvalid", s.probes.fault)
    stable, accuracy, spec = draft.status.stable, draft.status.accuracy, s.spec
    if stable is None or spec is None:
        return ("AccuracyVerified", "Unknown", "NoRevision", "nothing serves yet")
    if stable.dtype == spec.kv_cache.baseline:
        return ("AccuracyVerified", "True", "Reference", f"{stable.dtype} is what accuracy is measured against")
    last, runs = accuracy.last, f"of {spec.accuracy.failure_limit} runs in a row failed"
    if last is None or last.revision != stable.revision:
        found = f"{stable.dtype} has not been compared with a 16-bit engine"
    else:
        found = (
            f"{last.dtype}{f' on pod {last.pod}' if last.pod else ''}: excess KL "
            f"{last.excess_kl_micronats / 1000:.1f} millinats, top-1 agreement {last.top1_agreement_permille / 10:.1f}%"
        )
    if drifted(draft.status, spec):
        return ("AccuracyVerified", "False", DRIFTED, f"{found}; {accuracy.failures} runs in a row failed")
    if accuracy.errors >= spec.accuracy.consecutive_error_limit:
        # Not the number: it grows with every run, and nobody is helped by a new message each time.
        return ("AccuracyVerified", "Unknown", "ProbeErrors", f"the last runs brought no verdict (see events); {found}")
    if last is None or last.revision != stable.revision:
        return ("AccuracyVerified", "Unknown", "NotProbed", found)
    if accuracy.failures:
        return ("AccuracyVerified", "Unknown", "ProbeFailed", f"{found}; {accuracy.failures} {runs}")
    if known(draft, s) is None:
        unwatched = "no 16-bit reference is kept for the present model and probe sets, the next canary captures one"
        return ("AccuracyVerified", "Unknown", "NotWatched", f"{found}; not watched since: {unwatched}")
    word: _Word = "True" if last.verdict == "Passed" else "False"
    return ("AccuracyVerified", word, f"Probe{last.verdict}", found)


def _calibration(draft: Draft, s: Snapshot) -> _Line:
    """Whether the engines that serve, and those on trial, have the factors of their revision."""
    stable, canary = draft.status.stable, draft.status.canary
    sides = [part.revision for part in (stable, canary) if part is not None]
    found = [text for revision in sides if (text := factors.mixed(s, revision)) is not None]
    if found:
        return ("CalibrationConsistent", "False", factors.REASON, "; ".join(found))
    sample = s.last_sample(stable.revision) if stable is not None else None
    if stable is not None and not formats.parse(stable.dtype).ours:
        return ("CalibrationConsistent", "True", "NotCalibrated", f"{stable.dtype} has no calibration factors")
    if sample is None or not sample.factors:
        return ("CalibrationConsistent", "Unknown", "NotReported", "no engine has told its calibration factors yet")
    return (
        "CalibrationConsistent",
        "True",
        "SameFactors",
        f"all engines have the calibration factors {sample.factors}",
    )


def _spec_accepted(draft: Draft, s: Snapshot, target: Target, objects: _Line) -> _Line:
    if objects[1] == "False":
        note = "the spec is valid, and not all that it asks for could be written: see ObjectsAccepted"
        return ("SpecAccepted", "True", "PartlyActedOn", note)
    if not s.server.pod_disruption_budgets:
        note = "this API server does not serve policy/v1: no PodDisruptionBudget is kept"
        return ("SpecAccepted", "True", "PartlyActedOn", note)
    window = _window_note(draft, s, target)
    if window is not None:
        return ("SpecAccepted", "True", "PartlyActedOn", window)
    return ("SpecAccepted", "True", "Accepted", "every field that is set is acted on")


def _window_note(draft: Draft, s: Snapshot, target: Target) -> str | None:
    """What is to be known where the engines that the spec asks for serve another recent window than it asks for."""
    stable = draft.status.stable
    sample = s.last_sample(stable.revision) if stable is not None else None
    if s.spec is None or stable is None or sample is None or stable.revision != target.revision:
        return None
    asked = s.spec.kv_cache.recent_tokens_of(stable.dtype)
    if asked is None or sample.recent_tokens in (None, asked):
        return None
    return (
        f"spec.kvCache.recentTokens is {asked}, and the engines read the last {sample.recent_tokens} tokens at 8 bits; "
        "kvpilot_recent_window_info of an engine says why: use an image with a vLLM that can, or set what it serves"
    )
