"""The verdict on a probe's measurement. The control (16 bits compared with themselves) must meet limits, too."""

from dataclasses import dataclass

from kvpilot_operator.api.rollout import Accuracy
from kvpilot_operator.api.words import Reason, Verdict
from kvpilot_operator.decide.intervals import share_change
from kvpilot_operator.state.accuracy import Baseline
from kvpilot_operator.state.decision import Cause
from kvpilot_operator.state.status import clip
from kvpilot_probes.stats import Measurement

# Characters shown of a prompt and of each answer, so that all three fit into an Event.
MAX_SHOWN = 300
# Fewer compared positions than this say nothing about a 99th percentile or a share in percent.
MIN_POSITIONS = 100
# Probability that a dtype exactly at the agreement limit fails by chance. Agreement varies by 3 points at 250
# positions.
ALPHA = 0.01
# The limits of the control are never stricter than these, even if the spec's are. Sound engines differ from themselves
# by 0.8 millinats and agree on 98.9% of the tokens (docs/accuracy-watch.md).
SOUND_MICRONATS = 2_000
SOUND_AGREEMENT_PERCENT = 98


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict, its one-word reason, and the numbers behind it."""

    verdict: Verdict
    reason: str
    message: str
    excess_kl_micronats: int


def judge(found: Measurement, control: Baseline, limits: Accuracy) -> Judgement:
    """Judge a candidate's damage: the KL divergence and disagreement that exceed those of the control.

    The agreement limit is lowered by the share of tokens on which the control disagrees with itself. A candidate fails
    this limit only if chance does not explain the difference. If the control is unusable, the verdict is Inconclusive.
    """
    excess = max(0, found.mean_kl_micronats - control.control_mean_kl_micronats)
    allowed = limits.max_excess_kl_millinats * 1000
    fault = control_fault(control, limits)
    if fault is not None:
        return Judgement(Verdict.INCONCLUSIVE, *fault, excess)
    noise = 1000 - control.control_top1_agreement_permille
    agreement = found.top1_agreement_permille
    needed = limits.min_top1_agreement_percent * 10 - noise
    against = (control.control_top1_agreement_permille, control.positions)
    disagrees = _surely_below((agreement, found.positions), against, limits.min_top1_agreement_percent)
    chance = ", within chance" if agreement < needed and not disagrees else ""
    numbers = (
        f"excess KL {excess / 1000:.1f} millinats (limit {limits.max_excess_kl_millinats}), "
        f"p99 {found.p99_kl_micronats / 1000:.0f}, top-1 agreement {agreement / 10:.1f}% "
        f"(limit {needed / 10:.1f}%{chance}), {found.positions} positions of {found.prompts} prompts"
    )
    # Fail for damage beyond the limits even after few positions: probes of a broken dtype stop early.
    few = min(found.positions, control.positions) < MIN_POSITIONS
    if (excess > allowed or disagrees) and (not few or excess > 10 * allowed):
        return Judgement(Verdict.FAILED, Reason.ACCURACY_REGRESSED, numbers, excess)
    if few:
        text = f"{numbers}; at least {MIN_POSITIONS} are needed, and as many of the control ({control.positions})"
        return Judgement(Verdict.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES, text, excess)
    return Judgement(Verdict.PASSED, Reason.WITHIN_LIMITS, numbers, excess)


def control_fault(control: Baseline, limits: Accuracy) -> Cause | None:
    """Return the cause that makes a baseline with this control unusable. The control is judged like a candidate."""
    if not control.positions:
        text = "the 16-bit engine could not be compared with itself: 0 positions. Name more or longer probe sets"
        return Cause(Reason.BASELINE_UNFIT, text)
    mean, agreement = control.control_mean_kl_micronats, control.control_top1_agreement_permille
    allowed = max(limits.max_excess_kl_millinats * 1000, SOUND_MICRONATS)
    needed = min(limits.min_top1_agreement_percent, SOUND_AGREEMENT_PERCENT)
    if mean <= allowed and not _surely_below((agreement, control.positions), (1000, control.positions), needed):
        return None
    return Cause(
        Reason.BASELINE_UNFIT,
        f"the 16-bit engine differs from its own answers by a mean KL of {mean / 1000:.1f} millinats (limit "
        f"{allowed / 1000:g}), top-1 agreement {agreement / 10:.1f}% (limit {needed}%), and "
        "cannot be a reference. Look for its fault (GPU, image, arguments), or loosen the limits of accuracy",
    )


def _surely_below(found: tuple[int, int], against: tuple[int, int], percent: int) -> bool:
    """Return True if agreement (permille, positions) is below this limit by more than chance explains."""
    if not found[1] or not against[1]:
        return False
    shares = [(permille * positions / 1000, positions) for permille, positions in (found, against)]
    return share_change(shares[0], shares[1], ALPHA).high < percent / 100 - 1


def both_answers(m: Measurement, dtype: str) -> str | None:
    """Return the prompt with the largest damage and both answers, for an Event. Return None if no prompt was sent."""
    if m.sample is None:
        return None
    shown = (m.sample.prompt[-MAX_SHOWN:], m.sample.stable, m.sample.canary)
    prompt, stable, canary = (clip(text, MAX_SHOWN) for text in shown)
    return f"asked: …{prompt} | 16-bit: {stable} | {dtype}: {canary}"
