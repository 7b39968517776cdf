"""Obtain the baseline (the 16-bit engine's answers to the probes): find it in a ConfigMap, or capture it from a pod."""

from dataclasses import replace

from kvpilot_operator.api.names import baseline_name, engine_url
from kvpilot_operator.api.words import Action, ConditionType, Reason, Stage, Verdict
from kvpilot_operator.decide.accuracy.reported import as_asked, mismatch
from kvpilot_operator.decide.accuracy.verdict import control_fault
from kvpilot_operator.decide.context import Context
from kvpilot_operator.state.accuracy import Baseline
from kvpilot_operator.state.decision import Capture, Captured, Cause, Find, Measure, NothingKept, ProbeFailed
from kvpilot_operator.state.objects import PodView
from kvpilot_operator.times import utc
from kvpilot_probes import codec


def known(c: Context) -> Baseline | None:
    """Return the baseline of the present model and probe sets if the status names a usable one."""
    baseline = c.status.accuracy.baseline
    if baseline is None or baseline.identity != c.snapshot.probes.identity:
        return None
    return baseline if (misreported(c) or control_fault(baseline, c.spec.accuracy)) is None else None


def misreported(c: Context) -> Cause | None:
    """Return the cause if the engines that give the 16-bit answers report another dtype, else None."""
    found = mismatch(c.snapshot, c.reference, c.spec.kv_cache.baseline)
    return None if found is None else Cause(Reason.BASELINE_UNFIT, found)


def reference_fault(c: Context) -> Cause | None:
    """Return the cause if the 16-bit engine cannot give a baseline for the present probe sets, else None."""
    named, result = c.status.accuracy.baseline, c.snapshot.probe_result
    if known(c) is not None:
        return None
    if (other := misreported(c)) is not None:
        return other
    outcome = result.outcome if result is not None and isinstance(result.request, Capture) else None
    if isinstance(outcome, ProbeFailed) and outcome.reason == Reason.BASELINE_UNFIT:
        return Cause(outcome.reason, outcome.message)
    told = c.before.condition(ConditionType.ACCURACY_VERIFIED)
    if outcome is None and told is not None and told.reason == Reason.BASELINE_UNFIT and isinstance(wanted(c), Capture):
        return Cause(told.reason, told.message)  # Keep the cause until the next capture ends.
    if named is not None and named.identity == c.snapshot.probes.identity:
        return control_fault(named, c.spec.accuracy)
    return None


def on_trial(c: Context) -> bool:
    """Return True if a canary still needs a verdict on its accuracy."""
    canary = c.canary
    probed = canary is not None and canary.stage in (Stage.STARTING, Stage.PROBING)
    return canary is not None and probed and canary.verdict == Verdict.PENDING


def wanted(c: Context) -> Find | Capture | None:
    """Return the probe request that finds or captures a missing baseline, or None if no request is needed.

    Mode Auto captures a baseline before a trial needs it. The other modes capture one only during a trial.
    """
    s, canary, stable = c.snapshot, c.canary, c.stable
    pods = s.answering_pods(c.reference) if as_asked(s, c.reference, c.spec.kv_cache.baseline) else ()
    config_map = baseline_name(s.key.name, s.probes.identity)
    if pods and (on_trial(c) or c.spec.kv_cache.mode == "Auto"):
        pod = s.pod_to_ask(pods)
        return Capture(
            identity=f"capture/{_sought(c)}/{canary.errors if canary is not None else 0}/{pod.name}",
            pod=pod.name,
            url=engine_url(pod.ip, pod.mesh),
            model=c.spec.model.served_name,
            baseline=s.probes.identity,
            config_map=config_map,
            serving=s.traffic == c.reference,
        )
    if on_trial(c) or (stable is not None and stable.dtype != c.spec.kv_cache.baseline):
        return Find(f"find/{_sought(c)}", s.probes.identity, config_map)
    return None


def measure(c: Context, kept: Baseline, pod: PodView, dtype: str, identity: str, *, serving: bool = False) -> Measure:
    """Return the request to compare a pod that runs this KV-cache dtype with a kept baseline."""
    model = c.spec.model.served_name
    config_map = baseline_name(c.snapshot.key.name, kept.identity)
    return Measure(identity, pod.name, engine_url(pod.ip, pod.mesh), model, dtype, config_map, serving)


def borrowed(c: Context) -> str | None:
    """Return the 16-bit revision from which to borrow a replica for capturing a baseline, or None.

    A replica is borrowed only if no baseline is stored and no 16-bit revision serves or is on trial.
    """
    s, result = c.snapshot, c.snapshot.probe_result
    if s.probes.fault is not None or not on_trial(c) or known(c) is not None or c.reference in c.sides:
        return None
    nothing = result is not None and isinstance(result.outcome, NothingKept)
    searched = nothing and result is not None and result.request.identity == f"find/{_sought(c)}"
    # A borrowed replica that exists stays until the baseline is captured, without another search for a stored one.
    return c.reference if c.reference in s.deployments or searched else None


def adopt(c: Context, found: Captured) -> Context:
    """Name the found baseline in the status. `act/perform.py` stores a new baseline before it writes the status."""
    probes, control = c.snapshot.probes, found.baseline.control
    if control is None or found.baseline.identity != probes.identity or known(c) is not None:
        return c
    baseline = described(found.baseline)
    if (misreported(c) or control_fault(baseline, c.spec.accuracy)) is not None:
        return c
    when = f", captured at {utc(control.captured)}" if found.adopted else ""
    c = c.set_accuracy(baseline=baseline).record(
        Action.KEEP_BASELINE,
        "BaselineAdopted" if found.adopted else "BaselineCaptured",
        f"{control.positions} positions of {control.prompts} prompts in {found.baseline.dtype}{when}; the control: "
        f"mean KL {control.mean_kl_micronats / 1000:.2f} millinats, top-1 agreement "
        f"{control.top1_agreement_permille / 10:.1f}%",
    )
    return c if found.adopted else replace(c, baseline=found.baseline)


def described(kept: codec.Baseline) -> Baseline:
    """Summarise a baseline and its control run for the status."""
    control = kept.control
    assert control is not None  # noqa: S101 - whoever has none has nothing to compare with
    return Baseline(
        identity=kept.identity,
        positions=control.positions,
        control_mean_kl_micronats=control.mean_kl_micronats,
        control_top1_agreement_permille=control.top1_agreement_permille,
    )


def _sought(c: Context) -> str:
    """Return the part of a request's identity that names the baseline and the limits, so that new limits make a new
    request."""
    limits = c.spec.accuracy
    return f"{c.snapshot.probes.identity}/{limits.max_excess_kl_millinats}/{limits.min_top1_agreement_percent}"
