"""Judge a probe's result. The control run (the 16-bit engine compared with itself) must meet limits, too."""

from dataclasses import dataclass

from kvpilot_operator.api.rollout import Accuracy
from kvpilot_operator.api.words import Reason, Verdict
from kvpilot_operator.decide.intervals import share_change
from kvpilot_operator.state.accuracy import Baseline
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.status import clip
from kvpilot_probes.results import baseline_worse, candidate_worse
from kvpilot_probes.sequential import ALL, Allowed, Answer, decide
from kvpilot_probes.stats import MICRO, Measurement

# Characters shown of a prompt and of each answer, so that all three fit into an Event.
MAX_SHOWN = 300
# Probability that the test refuses, by chance, a control run whose true agreement is exactly at the limit.
ALPHA = 0.01
# Strictest limits of the control run, even if the spec's limits are stricter. A sound engine differs from its own
# earlier answers by 0.8 millinats, and agrees with them on 98.9% of the tokens (docs/accuracy-watch.md).
SOUND_MICRONATS = 2_000
SOUND_AGREEMENT_PERCENT = 98


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict on a probe. `message` has the figures, `covered` the buckets (kinds of prompts) with and without one."""

    verdict: Verdict
    reason: str
    message: str
    excess_kl_micronats: int
    covered: str = ""


def judge(found: Measurement, control: Baseline, limits: Accuracy) -> Judgement:
    """Judge a candidate's divergence by the sequential test. An unusable control run makes the verdict Inconclusive."""
    excess = max(0, found.mean_kl_micronats - control.control_mean_kl_micronats)
    fault = control_fault(control, limits)
    if fault is not None:
        return Judgement(Verdict.INCONCLUSIVE, *fault, excess)
    outcome = decide(found.seen, found.planned, allowed(control, limits), ended=True)
    needed = limits.min_top1_agreement_percent * 10 - (1000 - control.control_top1_agreement_permille)
    numbers = (
        f"excess KL {excess / 1000:.1f} millinats (limit {limits.max_excess_kl_millinats}), "
        f"p99 {found.p99_kl_micronats / 1000:.0f}, top-1 agreement {found.top1_agreement_permille / 10:.1f}% "
        f"(limit {needed / 10:.1f}%), {found.positions} positions of {found.prompts} prompts"
    )
    left = (*outcome.open, *((f"{found.refused} refused prompts with images",) if found.refused else ()))
    uncovered = f"not: {', '.join(left)}; " if left else ""
    late = ", when its time was over" if found.cut else ""
    cost = f"{found.tokens:,} tokens in {found.milliseconds / 1000:.0f} s{late}"
    covered = f"{', '.join(outcome.sound) or 'nothing'}; {uncovered}{cost}"
    for tasks in found.tasks:
        if baseline_worse(tasks):
            text = (
                f"{tasks.bucket}: the 16-bit engine solved {tasks.baseline_solved} of {tasks.asked} tasks, "
                f"the judged one {tasks.candidate_solved}: the baseline is damaged. Look for the 16-bit engine's fault"
            )
            return Judgement(Verdict.INCONCLUSIVE, Reason.BASELINE_UNFIT, text, excess, covered)
    if found.broken:
        text = f"{found.broken} positions have logprobs that are not numbers (NaN, infinite or missing): {numbers}"
        return Judgement(Verdict.FAILED, Reason.ACCURACY_REGRESSED, text, excess, covered)
    worse = next((tasks for tasks in found.tasks if candidate_worse(tasks)), None)
    if worse is not None and outcome.answer != Answer.FAILED:
        solved = f"{worse.candidate_solved} of {worse.asked} tasks solved, {worse.baseline_solved} by the 16-bit engine"
        text = f"{worse.bucket}: {solved}; {numbers}"
        return Judgement(Verdict.FAILED, Reason.ACCURACY_REGRESSED, text, excess, covered)
    if outcome.answer == Answer.FAILED:
        text = f"{_figures(found, outcome.failed or ALL, control, limits)}{numbers}"
        return Judgement(Verdict.FAILED, Reason.ACCURACY_REGRESSED, text, excess, covered)
    if outcome.answer == Answer.GO_ON:
        text = f"{numbers}; too few to decide about {', '.join(outcome.open) or ALL}: name more or longer probe sets"
        return Judgement(Verdict.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES, text, excess, covered)
    return Judgement(Verdict.PASSED, Reason.WITHIN_LIMITS, numbers, excess, covered)


def _figures(found: Measurement, bucket: str, control: Baseline, limits: Accuracy) -> str:
    """Return the figures of a failed bucket of prompts as text. The caller adds the figures over all prompts."""
    seen = [one for one in found.seen if one.bucket == bucket]
    if not seen:
        return f"{bucket}: "
    excess = 1000 * sum(one.kl for one in seen) / len(seen) - control.control_mean_kl_micronats / 1000
    agreement = 100 - 100 * sum(one.disagreement for one in seen) / len(seen)
    return (
        f"{bucket}: excess KL {max(0.0, excess):.1f} millinats (limit {limits.max_excess_kl_millinats}), top-1 "
        f"agreement {agreement:.1f}% in {len(seen)} prompts; {ALL}: "
    )


def allowed(control: Baseline, limits: Accuracy) -> Allowed:
    """Return the limits of the sequential test: the spec's limits plus the noise of the control run."""
    return Allowed(
        kl=limits.max_excess_kl_millinats / 1000,
        disagreement=1 - limits.min_top1_agreement_percent / 100,
        noise_kl=control.control_mean_kl_micronats / MICRO,
        noise_disagreement=1 - control.control_top1_agreement_permille / 1000,
    )


def control_fault(control: Baseline, limits: Accuracy) -> Cause | None:
    """Return the cause if this control run shows that the baseline is unusable, else None."""
    if not control.positions:
        text = "the 16-bit engine could not be compared with itself: 0 positions. Name more or longer probe sets"
        return Cause(Reason.BASELINE_UNFIT, text)
    mean, agreement = control.control_mean_kl_micronats, control.control_top1_agreement_permille
    allowed = max(limits.max_excess_kl_millinats * 1000, SOUND_MICRONATS)
    needed = min(limits.min_top1_agreement_percent, SOUND_AGREEMENT_PERCENT)
    agreed, positions = agreement * control.positions / 1000, control.positions
    if mean <= allowed and share_change((agreed, positions), (positions, positions), ALPHA).high >= needed / 100 - 1:
        return None
    return Cause(
        Reason.BASELINE_UNFIT,
        f"the 16-bit engine differs from its own answers by a mean KL of {mean / 1000:.1f} millinats (limit "
        f"{allowed / 1000:g}), top-1 agreement {agreement / 10:.1f}% (limit {needed}%), and "
        "cannot be the baseline. Look for its fault (GPU, image, arguments), or loosen the limits of spec.accuracy",
    )


def both_answers(m: Measurement, dtype: str) -> str | None:
    """Return the most affected prompt and its answers (16-bit and `dtype`) as text for an Event, or None."""
    if m.sample is None:
        return None
    shown = (m.sample.prompt[-MAX_SHOWN:], m.sample.stable, m.sample.canary)
    prompt, stable, canary = (clip(text, MAX_SHOWN) for text in shown)
    return f"asked: …{prompt} | 16-bit: {stable} | {dtype}: {canary}"
