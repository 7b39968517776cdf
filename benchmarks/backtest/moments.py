"""Statistics of a load's requests for the interval model: means, and quantiles of their prefill work."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvpilot_cli.backtest.costs import Costs
from kvpilot_cli.backtest.loads import STEP, Load

Array = NDArray[np.float64]
POINTS = np.array([0.1, 0.3, 0.5, 0.7, 0.85, 0.93, 0.97, 0.99])
"""Quantiles of prefill work that represent its distribution. Each stands for the share of requests in WEIGHTS."""
WEIGHTS = np.array([0.2, 0.2, 0.2, 0.18, 0.12, 0.05, 0.03, 0.02])


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics of one load, in tokens unless stated otherwise.

    Names begin with the kind of a request: `new` is a session's first turn, `hit` a later turn with a cached prefix,
    `miss` a later turn without one. `tokens` is the mean number of tokens to prefill. `pairs` is the mean number of
    pairs of a prefilled token and a token before it, to which the time of prefill's attention is proportional.
    """

    turns: float
    """Mean number of turns of a session."""
    pause: float
    """Mean seconds between an answer and the session's next request."""
    prompt: float
    output: float
    held: float
    """Mean number of tokens in the KV cache of a decoding request."""
    held_cv: float
    """Coefficient of variation (standard deviation over mean) of the numbers of tokens whose mean is `held`."""
    first: float
    """Mean number of tokens in the KV cache of a request that is its session's first turn."""
    reusable: float
    """Share of requests that are not a first turn, and so could reuse a prefix."""
    new_tokens: float
    new_pairs: float
    hit_tokens: float
    hit_pairs: float
    miss_tokens: float
    miss_pairs: float
    new_points: Array
    """Prefill tokens and pairs at the quantiles POINTS: [points, 2]."""
    hit_points: Array
    miss_points: Array


def measure(load: Load, costs: Costs, requests: int = 20000) -> Moments:
    """Return the statistics of a sample of the load's sessions, without variation over the day."""
    steps = max(1, int(np.ceil(requests / load.shape.turns / max(load.rate.mean() * STEP, 1.0))))
    drawn = replace(load, rate=np.full(steps, max(load.rate.mean(), 1.0)))
    rows, held = [], []
    count = 0
    for session in drawn.sessions():
        before = 0
        for prompt, output, _ in session.turns:
            rows.append((prompt, output, before))
            held.append(prompt + output / 2 + costs.block_size / 2)
            before = prompt + output
        count += 1
    table = np.array(rows, dtype=np.float64)
    prompt, output, before = table.T
    weight = output / output.sum()
    holding = np.array(held)
    mean = float((holding * weight).sum())
    spread = float(np.sqrt(((holding - mean) ** 2 * weight).sum()))
    new = prompt - before
    again = before > 0
    later = again if again.any() else ~again
    hit = np.stack([new, new * (before + new / 2)], axis=1)[later]
    miss = np.stack([prompt, prompt**2 / 2], axis=1)
    first, miss = miss[~again], miss[later]
    return Moments(
        turns=len(rows) / count, pause=load.shape.pause + 1.0, prompt=float(prompt.mean()),
        output=float(output.mean()), held=mean, held_cv=spread / mean, first=float(holding[~again].mean()),
        reusable=float(again.mean()),
        new_tokens=float(first[:, 0].mean()), new_pairs=float(first[:, 1].mean()),
        hit_tokens=float(hit[:, 0].mean()), hit_pairs=float(hit[:, 1].mean()),
        miss_tokens=float(miss[:, 0].mean()), miss_pairs=float(miss[:, 1].mean()),
        new_points=_points(first), hit_points=_points(hit), miss_points=_points(miss),
    )  # fmt: skip


def _points(work: Array) -> Array:
    order = np.argsort(work[:, 0])
    return np.asarray(work[order[(POINTS * (len(order) - 1)).astype(int)]])
