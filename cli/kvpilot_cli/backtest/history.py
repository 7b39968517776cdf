"""Reconstruct the load of one service, minute by minute, from its history in Prometheus.

The input is a file of answers of `/api/v1/query_range` (result type matrix). Counters may reset, and values between
scrapes are interpolated. These metrics are used:

- vllm:request_success_total gives the request rate.
- vllm:prompt_tokens_total and vllm:generation_tokens_total give the mean lengths.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from kvpilot_cli.backtest.costs import BacktestError
from kvpilot_cli.backtest.loads import STEP, Array, Load, Shape

REQUESTS, PROMPTS, GENERATED = "vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
METRICS = (REQUESTS, PROMPTS, GENERATED)
SIGMA = 0.6
"""Sigma of the lognormal lengths around each minute's mean. It is assumed, because counters do not show it."""
_LEAST_POINTS = 10


class _Counter(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, float]]


class _Data(msgspec.Struct, rename="camel"):
    result_type: Literal["matrix"]
    result: list[_Counter]


class _Answer(msgspec.Struct):
    status: Literal["success"]
    data: _Data


class _Series(NamedTuple):
    name: str
    times: Array
    values: Array


def read(path: Path, seed: int = 0) -> Load:
    """Read exported JSON: an answer of query_range, or a list of them."""
    try:
        return parse(path.read_bytes(), path.stem, seed)
    except OSError as error:
        raise BacktestError(
            f"history: {path} cannot be read ({error}); give the JSON of /api/v1/query_range"
        ) from error


def parse(text: bytes, name: str, seed: int = 0) -> Load:
    """Turn answers of query_range into a load with one rate and one mean length for each minute."""
    try:
        # Prometheus writes values as text, so accept text for numbers (strict=False).
        answers = msgspec.json.decode(text, type=_Answer | list[_Answer], strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BacktestError(
            f"history: {name}: {error}; give an answer of /api/v1/query_range for plain metrics, as it came"
        ) from error
    series = [one for answer in (answers if isinstance(answers, list) else [answers]) for one in _series(answer)]
    found = sorted({s.name for s in series})
    for metric in METRICS:
        if metric not in found:
            raise BacktestError(
                f"history: no series of {metric}; export it too (found: {', '.join(found) or 'nothing'})"
            )
    first, last = min(s.times[0] for s in series), max(s.times[-1] for s in series)
    steps = int((last - first) // STEP)
    if steps < _LEAST_POINTS:
        raise BacktestError(f"history: it spans {last - first:.0f} s; give at least {_LEAST_POINTS} minutes")
    edges = first + STEP * np.arange(steps + 1)
    counts = {m: sum((_increase(s, edges) for s in series if s.name == m), np.zeros(steps)) for m in METRICS}
    requests = counts[REQUESTS]
    total = requests.sum()
    if total <= 0:
        raise BacktestError(f"history: {REQUESTS} never rises; give a range with traffic")
    prompt, output = counts[PROMPTS].sum() / total, counts[GENERATED].sum() / total
    if prompt < 1 or output < 1:
        raise BacktestError(
            f"history: {prompt:.2f} prompt and {output:.2f} generated tokens a request; export one service's series"
        )
    # A lognormal's mean is its median times exp(sigma^2 / 2), so this factor converts the mean to the median.
    median = math.exp(-(SIGMA**2) / 2)
    shape = Shape(prompt * median, 0.0, output * median, SIGMA, turns=1.0, pause=0.0)
    busy = np.maximum(requests, 1e-9)
    scale = {
        m: np.where(requests > 0, np.clip(counts[m] / busy / mean, 0.05, 20.0), 1.0)
        for m, mean in ((PROMPTS, prompt), (GENERATED, output))
    }
    return Load(name, shape, requests / STEP, scale[PROMPTS], scale[GENERATED], seed)


def _series(answer: _Answer) -> Iterator[_Series]:
    for one in answer.data.result:
        points = np.array(sorted(point for point in one.values if math.isfinite(sum(point))))
        if (name := one.metric.get("__name__")) in METRICS and len(points):
            yield _Series(name, points[:, 0], points[:, 1])


def _increase(series: _Series, edges: Array) -> Array:
    """Return the increments of a counter between the edges. If its value falls, it was reset to zero."""
    steps = np.diff(series.values)
    grown = np.concatenate([[0.0], np.cumsum(np.where(steps >= 0, steps, series.values[1:]))])
    return np.asarray(np.diff(np.interp(edges, series.times, grown)))
