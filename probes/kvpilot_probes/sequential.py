"""Decide after each prompt, and in each bucket, if a cache has passed, has failed or needs more prompts. Pure.

Every test is a bet against the statement "the mean damage is healthy". Its *wealth* begins at 1, and each prompt
multiplies it by a factor, so that a large wealth is evidence against a healthy cache:

    wealth = product of (1 + x / m) / 2,    x: mean damage of a prompt,    m: largest mean that counts as healthy.

This is the betting martingale of Waudby-Smith and Ramdas (2024, JRSS B 86:1, section 4) with half of the largest bet.
Damage is never negative. So the expected factor is at most 1 if the expected x is at most m, even if x has a heavy
tail. By Ville's inequality, the probability that the wealth ever reaches 1/a is then at most a. The boundaries are
those of Wald's sequential test (1945, Annals of Mathematical Statistics 16:117). All bets share FALSE_ALARM equally.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# Largest probability that the bets of one run fail a canary whose mean damage is healthy in every bucket. It includes
# the operator's bets on live traffic. Tests of tasks (results.FALSE_ALARM) and the bucket `pressure` add to it
# (docs/accuracy-error-rates.md).
FALSE_ALARM = 1 / 1000
# Largest probability of calling a bucket sound although its mean damage is at the limit. It holds if the bet's inverse
# factor, 2 / (1 + x / m), has a mean of at most 1. This is true for exponential damage, and for log-normal damage with
# a standard deviation of up to 1.5 means. The noise may be at most a tenth of the limit (docs/accuracy-error-rates.md).
MISS = 1 / 20
# Share of the limit up to which damage counts as healthy. Between it and the limit, a long test may end either way.
HEALTHY = 0.5
# A canary fails if a single prompt has more than this many times the allowed damage. Bets need several prompts, but
# such damage may hit only one prompt of a bucket. Measured caches stay below it (docs/accuracy-error-rates.md).
OUTLIER = 25
# Smallest number of prompts of a bucket that can be sound, because one prompt at most halves the wealth.
MIN_PROMPTS = math.ceil(math.log2(1 / MISS))
ALL = "all prompts"
_TINY = 1e-9


class Seen(NamedTuple):
    """Damage to one prompt in one bucket: mean KL in nats, and share of positions with another most likely token."""

    bucket: str
    kl: float
    disagreement: float


@dataclass(frozen=True, slots=True)
class Allowed:
    """Limits of the damage beyond the control's noise. KL is in nats, disagreement is a share of positions."""

    kl: float
    disagreement: float
    noise_kl: float = 0.0
    noise_disagreement: float = 0.0


class Answer(Enum):
    """Decision of the sequential test after the prompts so far: passed, failed, or go on."""

    GO_ON = "GoOn"
    PASSED = "Passed"
    FAILED = "Failed"


class Outcome(NamedTuple):
    """Answer of the test, and the buckets that led to it.

    - `failed`: the bucket that failed the test, or None.
    - `sound`: the buckets that were shown to be sound.
    - `open`: all other buckets.
    """

    answer: Answer
    failed: str | None
    sound: tuple[str, ...]
    open: tuple[str, ...]


class _Bet:
    """State of one bet: its wealth, and the mean damage so far."""

    def __init__(self, healthy: float, limit: float) -> None:
        self.wealth, self._healthy, self._limit = 1.0, max(healthy, _TINY), limit
        self.count, self._sum = 0, 0.0

    def add(self, damage: float) -> float:
        self.count, self._sum = self.count + 1, self._sum + damage
        self.wealth *= (1 + damage / self._healthy) / 2
        return self.wealth

    @property
    def within(self) -> bool:
        return self._sum <= (self._limit + _TINY) * self.count

    @property
    def sound(self) -> bool:
        return self.within and self.wealth <= MISS


def decide(seen: Sequence[Seen], buckets: Collection[str], allowed: Allowed, *, ended: bool = False) -> Outcome:
    """Return the test's decision for the damage `seen` so far. `ended` is True if no prompt is left.

    All prompts together are tested like one more bucket. Their disagreement is tested, too; it is healthy up to the
    limit itself. A bucket that is neither sound nor failed at the end stays open. An open bucket prevents a pass only
    if its mean is beyond the limit and its wealth is above 1 / MISS. For a pass, the mean over all prompts must be
    within the limit.
    """
    # There are three bets besides those of the buckets: all prompts, disagreement, and live traffic (which the operator
    # compares).
    bound = (len(buckets) + 3) / FALSE_ALARM
    limit = allowed.kl + allowed.noise_kl
    bets = {name: _Bet(HEALTHY * allowed.kl + allowed.noise_kl, limit) for name in (*buckets, ALL)}
    choices = allowed.disagreement + allowed.noise_disagreement
    agreement = _Bet(choices, choices)
    for one in seen:
        if one.kl > OUTLIER * allowed.kl + allowed.noise_kl:
            return _outcome(Answer.FAILED, bets, one.bucket)
        for name in (one.bucket, ALL):
            if bets[name].add(one.kl) >= bound:
                return _outcome(Answer.FAILED, bets, name)
        if agreement.add(one.disagreement) >= bound:
            return _outcome(Answer.FAILED, bets, ALL)
    if all(bet.sound for bet in bets.values()):
        return _outcome(Answer.PASSED, bets)
    doubted = any(bet.wealth > 1 / MISS and not bet.within for bet in bets.values())
    enough = ended and bets[ALL].count >= MIN_PROMPTS and bets[ALL].within and not doubted
    return _outcome(Answer.PASSED if enough else Answer.GO_ON, bets)


def _outcome(answer: Answer, bets: dict[str, _Bet], failed: str | None = None) -> Outcome:
    named = [(name, bet.sound) for name, bet in bets.items() if name != ALL]
    sound, left = (tuple(name for name, yes in named if yes is wanted) for wanted in (True, False))
    return Outcome(answer, failed, sound, left)
