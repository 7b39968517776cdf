"""Load of one service, minute by minute, from its history in Prometheus.

The input is answers of `/api/v1/query_range` (result type matrix), from a file or a server. Counters may reset, and
values between scrapes are interpolated. These metrics are used:

- vllm:request_success_total gives the request rate.
- vllm:prompt_tokens_total and vllm:generation_tokens_total give the mean lengths.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from kvpilot_cli.backtest.costs import BacktestError
from kvpilot_cli.backtest.loads import STEP, Array, Load, Shape

REQUESTS, PROMPTS, GENERATED = "vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
METRICS = (REQUESTS, PROMPTS, GENERATED)
SIGMA = 0.6
"""Sigma of the lognormal lengths around each minute's mean. It is assumed, because counters do not show it."""
_LEAST_POINTS = 10


def read_file(path: Path, seed: int = 0) -> Load:
    """Read exported JSON: an answer of query_range, or a list of them."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BacktestError(
            f"history: {path} cannot be read ({error}); give the JSON of /api/v1/query_range"
        ) from error
    return parse(raw if isinstance(raw, list) else [raw], path.stem, seed)


def read_server(url: str, start: float, end: float, selector: str = "", seed: int = 0) -> Load:
    """Query a Prometheus for all metrics from `start` to `end` (Unix seconds). `selector` adds label matchers."""
    if not end > start:
        raise BacktestError(f"query range: end {end} is not after start {start}; give START,END in Unix seconds")
    query = f'{{__name__=~"{"|".join(METRICS)}"{"," if selector else ""}{selector}}}'
    params = {"query": query, "start": f"{start}", "end": f"{end}", "step": f"{STEP:.0f}"}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/api/v1/query_range", params=params, timeout=60)
        raw = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise BacktestError(
            f"prometheus: {url}: {type(error).__name__}: {error}; give a Prometheus' address"
        ) from error
    return parse([raw], "history", seed)


def parse(answers: Sequence[Any], name: str, seed: int = 0) -> Load:
    """Turn answers of query_range into a load on a grid of minutes."""
    series = [s for answer in answers for s in _series(answer)]
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


@dataclass(frozen=True, slots=True)
class _Series:
    name: str
    times: Array
    values: Array


def _series(answer: Any) -> list[_Series]:
    if not isinstance(answer, Mapping) or answer.get("status") != "success":
        error = answer.get("error", "no status") if isinstance(answer, Mapping) else type(answer).__name__
        raise BacktestError(
            f"history: status is not success ({error}); give an answer of /api/v1/query_range as it came"
        )
    data = answer.get("data")
    if not isinstance(data, Mapping) or data.get("resultType") != "matrix":
        kind = data.get("resultType") if isinstance(data, Mapping) else None
        raise BacktestError(
            f"history: data.resultType is {kind!r}; a range query gives matrix: use /api/v1/query_range"
        )
    found = []
    for item in data.get("result", ()):
        try:
            name = item["metric"]["__name__"]
            points = sorted((float(t), float(v)) for t, v in item["values"])
        except (KeyError, TypeError, ValueError) as error:
            raise BacktestError(
                f"history: a series cannot be read ({error!r}); query plain metrics, without rate()"
            ) from error
        points = [(t, v) for t, v in points if math.isfinite(v)]
        if name in METRICS and points:
            table = np.array(points)
            found.append(_Series(name, table[:, 0], table[:, 1]))
    return found


def _increase(series: _Series, edges: Array) -> Array:
    """Return the increments of a counter between the edges. If its value falls, it was reset to zero."""
    steps = np.diff(series.values)
    grown = np.concatenate([[0.0], np.cumsum(np.where(steps >= 0, steps, series.values[1:]))])
    return np.asarray(np.diff(np.interp(edges, series.times, grown)))
