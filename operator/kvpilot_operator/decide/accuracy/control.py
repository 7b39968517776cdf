"""Is a 16-bit engine a reference? Its control, the engine against its own answers, has to keep `spec.accuracy` itself.

What the control differs by is taken off a candidate's damage. So a control without a bound explains any damage.
"""

from __future__ import annotations

from kvpilot_operator.api.spec import Accuracy
from kvpilot_operator.api.words import Reason
from kvpilot_operator.decide.intervals import share_change
from kvpilot_operator.state.accuracy import Baseline
from kvpilot_operator.state.decision import Cause

# How often a dtype whose agreement is just at the limit fails by chance: of 250 positions three in a hundred more or
# fewer agree from one draw to the next.
ALPHA = 0.01
# Sound engines show this much noise (docs/accuracy-watch.md: a mean of 0.8 millinats and 98.9%): stricter limits
# judge only the damage beyond it.
SOUND_MICRONATS = 2_000
SOUND_AGREEMENT_PERCENT = 98


def control_fault(control: Baseline, limits: Accuracy) -> Cause | None:
    """Say why nothing can be measured against a baseline with this control, which is judged as a candidate is."""
    if not control.positions:
        text = "the 16-bit engine could not be compared with itself: 0 positions. Name more or longer probe sets"
        return Cause(Reason.BASELINE_UNFIT, text)
    mean, agreement = control.control_mean_kl_micronats, control.control_top1_agreement_permille
    allowed = max(limits.max_excess_kl_millinats * 1000, SOUND_MICRONATS)
    needed = min(limits.min_top1_agreement_percent, SOUND_AGREEMENT_PERCENT)
    if mean <= allowed and not surely_below((agreement, control.positions), (1000, control.positions), needed):
        return None
    return Cause(
        Reason.BASELINE_UNFIT,
        f"the 16-bit engine differs from its own answers by a mean KL of {mean / 1000:.1f} millinats (limit "
        f"{allowed / 1000:g}), top-1 agreement {agreement / 10:.1f}% (limit {needed}%), and "
        "cannot be a reference. Look for its fault (GPU, image, arguments), or loosen the limits of accuracy",
    )


def surely_below(found: tuple[int, int], against: tuple[int, int], percent: int) -> bool:
    """Return True if fewer positions agree than this limit asks for, by more than chance.

    Each side is its agreement in permille, and the positions that it is of.
    """
    if not found[1] or not against[1]:
        return False
    shares = [(permille * positions / 1000, positions) for permille, positions in (found, against)]
    return share_change(shares[0], shares[1], ALPHA).high < percent / 100 - 1
