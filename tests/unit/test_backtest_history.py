"""A Prometheus history becomes a load. The error for a broken history names field, value and remedy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpilot_cli.backtest.costs import BacktestError
from kvpilot_cli.backtest.history import parse, read

START = 1_767_225_600


def answer(*series: tuple[str, list[float]], step: int = 60) -> dict[str, Any]:
    result = [
        {
            "metric": {"__name__": name, "pod": str(i)},
            "values": [[START + step * k, str(v)] for k, v in enumerate(values)],
        }
        for i, (name, values) in enumerate(series)
    ]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def counters(minutes: int = 30, rate: float = 2.0) -> list[tuple[str, list[float]]]:
    done = [rate * 60 * k for k in range(minutes + 1)]
    return [
        ("vllm:request_success_total", done),
        ("vllm:prompt_tokens_total", [500 * d for d in done]),
        ("vllm:generation_tokens_total", [100 * d for d in done]),
    ]


def test_rates_and_mean_lengths_are_the_counters_increments() -> None:
    load = parse(json.dumps([answer(*counters())]).encode(), "x")
    assert load.rate == pytest.approx(np.full(30, 2.0))
    turns = [s.turns[0] for s in load.sessions()]
    assert np.mean([t[0] for t in turns]) == pytest.approx(500, rel=0.05)
    assert np.mean([t[1] for t in turns]) == pytest.approx(100, rel=0.05)


def test_two_pods_add_up_and_a_restart_counts_from_zero() -> None:
    series = counters()
    reset = [(name, values[:16] + [v - values[15] for v in values[16:]]) for name, values in series]
    load = parse(json.dumps([answer(*series), answer(*reset)]).encode(), "x")
    assert load.rate == pytest.approx(np.full(30, 4.0))


def test_a_file_may_hold_one_answer_or_a_list(tmp_path: Path) -> None:
    one, many = tmp_path / "one.json", tmp_path / "many.json"
    one.write_text(json.dumps(answer(*counters())))
    many.write_text(json.dumps([answer(c) for c in counters()]))
    assert read(one).rate == pytest.approx(read(many).rate)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"status": "error", "error": "bad query"}, r"x: Invalid enum value 'error' - at `\$\.status`; give an answer"),
        ({"status": "success", "data": {"resultType": "vector", "result": []}}, "'vector'.*resultType.*query_range"),
        (answer(*counters()[1:]), "request_success_total; export it"),
        (answer(*counters(5)), "at least 10 minutes"),
        (answer(*counters(rate=0.0)), "never rises"),
        (
            {"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {}}]}},
            "required field `values`",
        ),
        (["x"], r"got `str` - at `\$\[0\]`"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_remedy(broken: Any, told: str) -> None:
    with pytest.raises(BacktestError, match=told):
        parse(json.dumps(broken).encode(), "x")


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(BacktestError, match=r"history: x: .*; give an answer"):
        read(path)
