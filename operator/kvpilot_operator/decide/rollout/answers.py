"""Compare answers to users from canary and stable side: their lengths, and the share that did not end by themselves.

An engine may answer probes well but users' requests badly. Sequential tests by betting detect that:

- Cut time into slices in which both sides finished at least SLICE answers.
- In each slice, each figure (length, share) is far off or not, as FACTOR and MORE define.
- Each figure has a bet against the hypothesis "the canary is healthy: the figure is far off in at most half of the
  slices". The bet starts with a wealth of 0.
- Slice n first adds 1 / (n (n + 1)) to the wealth. So many good slices cannot hide later damage.
- Then it multiplies the wealth by 1 + STAKE if the figure is far off, else by 1 - STAKE.
- The canary fails once the wealth of one bet reaches its bound.

By Ville's inequality, the bets of a traffic step fail a healthy canary with a probability of at most 1 in 300,000,
whenever they are checked, and even if the answers of one slice resemble each other.

If requests are divided at random, the hypothesis holds for any distribution of answers: the canary's median is above
the stable side's as often as below, and a share reaches twice its mean at most half of the time (Markov). If each user
stays with one side, the sides' users may differ. So a slice is far off only if the sides' requests are similar (ALIKE).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from types import MappingProxyType

from kvpilot_operator.decide.intervals import log_quantile
from kvpilot_operator.decide.rollout.comparison import between
from kvpilot_operator.state.samples import Flows, Sample
from kvpilot_probes.sequential import FALSE_ALARM

SLICE = 10
STAKE = 0.75
# The canary's median length is far off if it differs from the stable side's by more than FACTOR. Its share of answers
# that did not end by themselves is far off if it is at least twice the stable side's, and at least MORE above it.
FACTOR = 3.0
MORE = 0.2
# The requests of canary and stable side are similar if their mean prompt lengths differ by at most this factor, and so
# do their mean max_tokens.
ALIKE = 2.0
# Probability of a false alarm that is left for these bets. The probes' bets, in up to 27 buckets, take 29/30 of
# FALSE_ALARM.
_LEFT = FALSE_ALARM / 30
_MOST_STEPS = 10


def differing(stable: Sequence[Sample], canary: Sequence[Sample], start: datetime, end: datetime) -> str | None:
    """Describe how the canary's answers differ from the stable side's beyond chance, or return None."""
    wealth, bound = dict.fromkeys(_FAR_OFF, 0.0), len(_FAR_OFF) * _MOST_STEPS / _LEFT
    seen: list[tuple[Flows, Flows]] = []
    for n, (ours, theirs) in enumerate(_slices(canary, stable, start, end), 1):
        seen.append((ours, theirs))
        for name, far_off in _FAR_OFF.items():
            wealth[name] = bet(wealth[name], n, _alike(ours, theirs) and far_off(ours, theirs))
            if wealth[name] >= bound:
                sides = [Flows.together(side) for side in zip(*seen, strict=True)]
                return f"users' answers {name} than the stable side's, beyond chance: {_told(*sides)}"
    return None


def bet(wealth: float, n: int, far_off: bool) -> float:
    """Return the wealth of a bet after slice `n` (counted from 1), from its wealth before. It grows if `far_off`."""
    return (wealth + 1 / (n * (n + 1))) * (1 + STAKE if far_off else 1 - STAKE)


def _slices(
    canary: Sequence[Sample], stable: Sequence[Sample], start: datetime, end: datetime
) -> Iterator[tuple[Flows, Flows]]:
    """Yield how much the counters of canary and stable side grew in each slice of time."""
    scrapes = [(s.time, side, s.flows) for side, of in enumerate((canary, stable)) for s in between(of, start, end)]
    held: tuple[list[Flows], list[Flows]] = [], []
    for _, group in groupby(sorted(scrapes, key=lambda one: one[0]), key=lambda one: one[0]):
        for _, side, flows in group:
            held[side].append(flows)
        if all(sum(map(_ended, flows)) >= SLICE for flows in held):
            yield Flows.together(held[0]), Flows.together(held[1])
            held = [], []


def _ended(flows: Flows) -> float:
    """Return the number of answers that ended without an error. `comparison` judges failed requests."""
    return flows.finished - flows.failed


def _alike(ours: Flows, theirs: Flows) -> bool:
    """Return True if canary and stable side got requests with similar mean prompt lengths and max_tokens."""
    asked = [(f.prompt_tokens / f.finished, f.asked_tokens / f.finished) for f in (ours, theirs)]
    return all(max(pair) <= ALIKE * min(pair) for pair in zip(*asked, strict=True))


def _median(flows: Flows) -> float:
    """Return the log of the median answer length; inf if no length is known."""
    return log_quantile(flows.generation_lengths, 0.5)


def _shorter(ours: Flows, theirs: Flows) -> bool:
    """Return True if the canary's answers are far shorter.

    Finished answers alone mislead: if a side has just got more requests, only its short answers have finished. So the
    canary must also have generated far fewer tokens per answer, counting those of unfinished answers.
    """
    made = [f.generation_tokens / _ended(f) for f in (ours, theirs)]
    return _median(theirs) - _median(ours) > math.log(FACTOR) and made[0] * FACTOR < made[1]


def _unended(flows: Flows) -> float:
    """Return the share of answers with a finished_reason other than stop: length, abort or repetition."""
    return max(0.0, 1 - flows.stopped / _ended(flows))


_FAR_OFF: Mapping[str, Callable[[Flows, Flows], bool]] = MappingProxyType({
    "are far longer": lambda ours, theirs: _median(ours) - _median(theirs) > math.log(FACTOR),
    "are far shorter": _shorter,
    "end by themselves far less often": lambda ours, theirs: (
        _unended(ours) >= max(2 * _unended(theirs), MORE + _unended(theirs))
    ),
})  # fmt: skip


def _told(ours: Flows, theirs: Flows) -> str:
    medians = [_median(f) for f in (ours, theirs)]
    lengths = " and ".join(f"{math.exp(one):.0f}" if math.isfinite(one) else "?" for one in medians)
    shares = " and ".join(f"{100 * _unended(f):.0f}%" for f in (ours, theirs))
    counts = " and ".join(f"{_ended(f):.0f}" for f in (ours, theirs))
    return f"median length {lengths} tokens, {shares} with finished_reason not stop, {counts} answers (canary, stable)"
