"""Agreement of two greedy runs on the same prompts, up to the first different token.

Logprobs are compared up to and including that position, because the two engines predict from the same tokens until
then. The KL divergence covers the tokens that are in both engines' lists of most likely tokens, and one event for all
other tokens. It is a lower bound of the divergence over the full vocabulary.
"""

import math
import statistics
from typing import Any

Answer = dict[str, Any]
"""Greedy answer: its `tokens`, and for each token its `logprobs`, a mapping from token ID (as text) to log-probability.
"""


def agreement(reference: list[Answer], other: list[Answer]) -> dict[str, Any]:
    """Compare the answers of two runs, prompt by prompt. Return these figures:

    - `answers_equal`: share of answers in which all tokens are equal.
    - `tokens_equal`: share of tokens that come before the first difference in their answer.
    - `top1_equal`: share of positions at which the most likely token is the same.
    - `mean_logprob_difference`: mean difference between the two runs' logprobs for the first run's token, in nats.
    - `mean_kl`, `p99_kl`: mean and 99th percentile of the KL divergence over `positions` positions, in nats.
    - `not_a_number`: positions that are left out because an engine returned NaN, which a correct engine never does.
    """
    prefixes, tokens, whole = 0, 0, 0
    differences: list[float] = []
    divergences: list[float] = []
    broken = 0
    for mine, theirs in zip(reference, other, strict=True):
        same = equal_prefix(mine["tokens"], theirs["tokens"])
        length = len(mine["tokens"])
        prefixes, tokens, whole = prefixes + same, tokens + length, whole + (same == length)
        for position in range(min(same + 1, length)):
            p, q = mine["logprobs"][position], theirs["logprobs"][position]
            chosen = str(mine["tokens"][position])
            if any(math.isnan(value) for value in (*p.values(), *q.values())):
                broken += 1
                continue
            if chosen in q:
                differences.append(abs(p[chosen] - q[chosen]))
            divergences.append(divergence(p, q))
    ordered = sorted(divergences)
    return {
        "answers": len(reference),
        "answers_equal": whole / len(reference),
        "tokens_equal": prefixes / tokens,
        "positions": len(ordered),
        "not_a_number": broken,
        "top1_equal": prefixes / (len(ordered) + broken),
        "mean_logprob_difference": statistics.fmean(differences or [math.nan]),
        "mean_kl": statistics.fmean(ordered or [math.nan]),
        "p99_kl": ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else math.nan,
    }


def equal_prefix(mine: list[int], theirs: list[int]) -> int:
    """Return how many tokens two answers have in common before their first difference."""
    pairs = zip(mine, theirs, strict=True)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(mine))


def divergence(p: dict[str, float], q: dict[str, float]) -> float:
    """Return KL(p || q) in nats, over the tokens in both lists and one event for the rest of the vocabulary."""
    shared = [(math.exp(p[token]), math.exp(q[token])) for token in p.keys() & q.keys()]
    rest = [max(1.0 - sum(mass), 1e-9) for mass in zip(*shared, strict=True)] if shared else [1.0, 1.0]
    return max(0.0, sum(a * math.log(a / b) for a, b in [*shared, (rest[0], rest[1])] if a > 0.0))
