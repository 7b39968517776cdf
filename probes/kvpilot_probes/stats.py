"""Compute the damage of a measurement from pairs of answers. Pure functions; logprobs are natural logs (nats).

Damage at a position is the Kullback-Leibler divergence of the candidate from the baseline over a partition of the
vocabulary. Each of the baseline's top-K tokens is a cell, and all other tokens together are one more:

    KL = sum_i p_i ln(p_i / q_i) + p_rest ln(p_rest / q_rest),    p_rest = 1 - sum_i p_i,  q_rest = 1 - sum_i q_i.

Coarsening a distribution can only lower its KL, so the figure is a lower bound of the full one. If the candidate does
not report a baseline token, the token gets the candidate's smallest reported probability, the largest that it can have.
Even then, garbage that shares no token with the baseline has a large KL.
"""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvpilot_probes.results import Tasks
from kvpilot_probes.sequential import Seen

# Smallest logprob. A float32 softmax cannot distinguish smaller ones, and with it damage stays below MAX_KL.
MIN_LOGPROB = -30.0
MAX_KL = -MIN_LOGPROB
# Smallest p_rest. A smaller one is a rounding error: float32 logprobs of 20 tokens add up to 1 only within about 1e-6.
MIN_REST = 1e-6
# Largest sum of probabilities. A larger sum is not a distribution. Logprobs rounded to 16 bits stay below it.
MAX_MASS = 1.01
MICRO = 1_000_000
MAX_TEXT = 400


class Logprobs(NamedTuple):
    """Answer at one position: the greedy token, and the logprobs of the top tokens (finite, in [MIN_LOGPROB, 0])."""

    token: int
    top: Mapping[int, float]


class Answers(Sequence[Logprobs]):
    """Answers at all positions of one prompt, in 8 bytes per logprob. Dicts would take twelve times as much memory."""

    __slots__ = ("_ends", "_ids", "_logprobs")

    def __init__(self, positions: Iterable[Logprobs]) -> None:
        self._ends, self._ids, self._logprobs = array("I"), array("I"), array("f")
        for token, top in positions:
            # Store the greedy token first. If logprobs are equal, only its place identifies it.
            self._ids.append(token)
            self._logprobs.append(top[token])
            rest = [one for one in top if one != token]
            self._ids.extend(rest)
            self._logprobs.extend(top[one] for one in rest)
            self._ends.append(len(self._ids))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        """Return one position. Slices are not supported."""
        end = self._ends[index]
        start = self._ends[index - 1] if index % len(self) else 0
        ids = self._ids[start:end]
        return Logprobs(ids[0], dict(zip(ids, self._logprobs[start:end], strict=True)))


@dataclass(frozen=True, slots=True)
class Compared:
    """Comparison of one position in both answers.

    - `prompt`: index of the prompt.
    - `kl`: KL divergence in nats.
    - `agrees`: True if both greedy tokens are equal.
    - `bucket`: the case that the prompt tests.
    - `broken`: True if the candidate's logprobs are not numbers.
    """

    prompt: int
    kl: float
    agrees: bool
    bucket: str = "general"
    broken: bool = False


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """End of one prompt, and the continuation by each side (`stable`, `canary`), for people to read."""

    prompt: str
    stable: str
    canary: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """Damage of a candidate's cache to its answers. Compare it with the damage of a control, not with zero.

    - `stderr_kl_micronats`: standard error of the mean, with prompts as clusters; 0 for a single prompt.
    - `tokens`: prompt tokens and requested tokens of all requests.
    - `seen`: damage of each prompt, in the order of the answers.
    - `planned`: buckets to judge.
    - `tasks`: number of tasks that each engine has solved, by bucket.
    - `broken`: number of positions with logprobs that are not numbers.
    - `cut`: True if time ran out before all prompts were measured.
    - `refused`: number of prompts with an image that the 16-bit engine refused, although it took others.
    """

    prompts: int
    positions: int
    requests: int
    milliseconds: int
    mean_kl_micronats: int
    p99_kl_micronats: int
    stderr_kl_micronats: int
    top1_agreement_permille: int
    sample: AnswerPair | None
    tokens: int = 0
    seen: tuple[Seen, ...] = ()
    planned: tuple[str, ...] = ()
    tasks: tuple[Tasks, ...] = ()
    broken: int = 0
    cut: bool = False
    refused: int = 0

    def extended(
        self, bucket: str, compared: Sequence[Compared], tokens: int, milliseconds: int, *, cut: bool = False
    ) -> "Measurement":
        """Return the measurement with one more bucket, the positions compared in it, and what they took."""
        return replace(
            self,
            seen=(*self.seen, *by_bucket(compared)),
            broken=self.broken + sum(one.broken for one in compared),
            planned=(*self.planned, bucket),
            tokens=self.tokens + tokens,
            milliseconds=self.milliseconds + milliseconds,
            cut=self.cut or cut,
        )


def impossible(top: Mapping[int, float], chosen: int) -> str | None:
    """Describe an impossible value among a position's logprobs, or return None. Only masked tokens may have -inf."""
    above = next((lp for lp in top.values() if not lp <= math.log(MAX_MASS)), None)
    if above is not None:
        return f"a logprob of {above:g}, which cannot be above 0"
    if top[chosen] < MIN_LOGPROB:
        return f"a logprob of {top[chosen]:g} for the token that was chosen"
    mass = math.fsum(math.exp(lp) for lp in top.values())
    return f"probabilities that add up to {mass:.3g}" if mass > MAX_MASS else None


def kl_nats(baseline: Mapping[int, float], candidate: Mapping[int, float]) -> float:
    """Return KL(baseline || candidate) in nats, from 0 to MAX_KL. Return MAX_KL if one of them is empty."""
    if not baseline or not candidate:
        return MAX_KL
    floor = min(candidate.values())
    p = _cells([_probability(lp) for lp in baseline.values()])
    q = _cells([_probability(candidate.get(token, floor)) for token in baseline])
    kl = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return min(max(kl, 0.0), MAX_KL)


def _probability(logprob: float) -> float:
    return math.exp(min(max(logprob, MIN_LOGPROB), 0.0))


def _cells(top: list[float]) -> list[float]:
    """Return the probabilities of the tokens, and of all other tokens together, scaled to a sum of 1."""
    cells = [*top, max(1.0 - math.fsum(top), MIN_REST)]
    total = math.fsum(cells)
    return [c / total for c in cells]


def compare(prompt: int, baseline: Logprobs, candidate: Logprobs, bucket: str = "general") -> Compared:
    """Compare the answers of baseline and candidate at one position."""
    agrees = baseline.token == candidate.token
    return Compared(prompt, kl_nats(baseline.top, candidate.top), agrees, bucket, not candidate.top)


def by_bucket(compared: Iterable[Compared]) -> tuple[Seen, ...]:
    """Return the mean damage of each prompt in each bucket. The order is that of the first positions."""
    groups: dict[tuple[int, str], list[Compared]] = {}
    for c in compared:
        groups.setdefault((c.prompt, c.bucket), []).append(c)
    return tuple(
        Seen(bucket, _mean([c.kl for c in group]), sum(not c.agrees for c in group) / len(group))
        for (_, bucket), group in groups.items()
    )


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least a `share` (0 to 1) of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0


def summarise(
    compared: Sequence[Compared],
    *,
    requests: int = 0,
    tokens: int = 0,
    milliseconds: int = 0,
    sample: AnswerPair | None = None,
    planned: Sequence[str] = (),
    tasks: tuple[Tasks, ...] = (),
    cut: bool = False,
    refused: int = 0,
) -> Measurement:
    """Return the measurement of all compared positions. The order of the positions affects only `seen`."""
    return Measurement(
        prompts=len({c.prompt for c in compared}),
        positions=len(compared),
        requests=requests,
        tokens=tokens,
        milliseconds=milliseconds,
        mean_kl_micronats=_mean_micronats(compared),
        p99_kl_micronats=round(percentile([c.kl for c in compared], 0.99) * MICRO),
        stderr_kl_micronats=round(_clustered_stderr(compared) * MICRO),
        top1_agreement_permille=_agreement_permille(compared),
        sample=sample,
        seen=by_bucket(compared),
        planned=tuple(dict.fromkeys(planned)),
        tasks=tasks,
        broken=sum(c.broken for c in compared),
        cut=cut,
        refused=refused,
    )


def worst_prompt(compared: Iterable[Compared]) -> int | None:
    """Return the index of the prompt with the largest mean damage, or the lowest index of equal ones."""
    groups = _by_prompt(compared)
    return min(groups, key=lambda p: (-_mean([c.kl for c in groups[p]]), p)) if groups else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _mean_micronats(compared: Sequence[Compared]) -> int:
    return round(_mean([c.kl for c in compared]) * MICRO)


def _agreement_permille(compared: Sequence[Compared]) -> int:
    """Return the share of agreeing positions in thousandths. It is rounded down, so that 1000 means all of them."""
    return sum(c.agrees for c in compared) * 1000 // len(compared) if compared else 0


def _by_prompt(compared: Iterable[Compared]) -> dict[int, list[Compared]]:
    groups: dict[int, list[Compared]] = {}
    for c in compared:
        groups.setdefault(c.prompt, []).append(c)
    return groups


def _clustered_stderr(compared: Sequence[Compared]) -> float:
    """Return the cluster-robust standard error of the mean (Liang and Zeger 1986), in nats."""
    groups = _by_prompt(compared)
    if len(groups) < 2:
        return 0.0
    mean = _mean([c.kl for c in compared])
    squares = math.fsum(math.fsum(c.kl - mean for c in group) ** 2 for group in groups.values())
    return math.sqrt(len(groups) / (len(groups) - 1) * squares) / len(compared)
