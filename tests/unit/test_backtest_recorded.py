"""A recorded load is CSV. Errors about a broken file name line, column and remedy."""

import csv
import io
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_cli.backtest.command import main
from kvpilot_cli.backtest.costs import BacktestError
from kvpilot_cli.backtest.recorded import COLUMNS, MOST_TOKENS, parse, read

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.backtest import traces

Rows = Sequence[tuple[int, int, int]]
"""Arrival in milliseconds, tokens of prompt and answer."""
DAY = 86_400_000

tokens = st.integers(0, MOST_TOKENS)
some_rows = st.lists(st.tuples(st.integers(0, 366 * DAY), tokens, tokens), min_size=1, max_size=20)


def written(rows: Rows) -> str:
    """Return the rows as a file with an extra column that the reader ignores."""
    text = io.StringIO()
    table = [(at / 1000, prompt, output, "a, b") for at, prompt, output in rows]
    csv.writer(text).writerows([(*COLUMNS, "model"), *table])
    return text.getvalue()


@given(some_rows)
def test_recorded_requests_are_sorted_by_arrival_and_those_without_tokens_are_left_out(rows: Rows) -> None:
    asked = sorted((row for row in rows if row[1] and row[2]), key=lambda row: row[0])
    text = io.StringIO(written(rows), newline="")
    if not asked:
        with pytest.raises(BacktestError, match="no request with tokens"):
            parse(text, "load")
        return
    load = parse(text, "load")
    assert load.left_out == len(rows) - len(asked)
    assert load.arrival == pytest.approx([(row[0] - asked[0][0]) / 1000 for row in asked], abs=1e-5)
    assert sorted(zip(load.prompt, load.output, strict=True)) == sorted(row[1:] for row in asked)
    sessions = list(load.sessions())
    assert [one.start for one in sessions] == load.arrival.tolist()
    assert {one.number for one in sessions} == set(range(len(asked)))
    assert all(len(one.turns) == 1 for one in sessions)
    assert load.seconds >= sessions[-1].start + 60
    assert math.fmod(load.seconds, 60) == 0


@given(some_rows.filter(lambda rows: any(p and o for _, p, o in rows)), st.floats(0.1, 5), st.integers(0, 9))
def test_a_scaled_load_repeats_each_request_as_often_as_requested_within_a_minute(
    rows: Rows, size: float, seed: int
) -> None:
    load = parse(io.StringIO(written(rows), newline=""), "load")
    try:
        scaled = load.scaled(size, seed)
    except BacktestError as error:
        assert size < 1
        assert f"size: {size} leaves none of the {len(load.arrival)} requests of load; give a larger size" in str(error)
        return
    assert abs(len(scaled.arrival) - int(size) * len(load.arrival)) <= len(load.arrival)
    assert (np.diff(scaled.arrival) >= 0).all()
    of = list(zip(load.arrival, load.prompt, load.output, strict=True))
    for at, prompt, output in zip(scaled.arrival, scaled.prompt, scaled.output, strict=True):
        assert any((p, o) == (prompt, output) and 0 <= at - came <= 60 for came, p, o in of)
    again = load.scaled(size, seed)
    assert (again.arrival == scaled.arrival).all()
    assert load.scaled(1.0, seed) is load
    if size >= 1:
        assert set(load.arrival) <= set(scaled.arrival)


@given(st.text() | st.text(alphabet='{}[]":,\n\r0123456789.eE-+ TIMESAPtokens_prom'))
def test_any_text_is_either_a_load_or_refused_with_a_message(text: str) -> None:
    try:
        load = parse(io.StringIO(text, newline=""), "x")
    except BacktestError as error:
        assert str(error).startswith("recorded: x")
    else:
        assert len(load.arrival)


@given(some_rows, st.data())
def test_a_bad_value_is_refused_with_its_line_and_column(rows: Rows, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(rows) - 1))
    column = data.draw(st.sampled_from(COLUMNS))
    bad = data.draw(st.sampled_from(["", "x", "nan", "inf", "1_0", "-", "1e400", "0x1", "\N{DEVANAGARI DIGIT ONE}"]))
    table = list(csv.DictReader(io.StringIO(written(rows))))
    table[number][column] = bad
    text = io.StringIO()
    writer = csv.DictWriter(text, table[0])
    writer.writeheader()
    writer.writerows(table)
    with pytest.raises(BacktestError) as refused:
        parse(io.StringIO(text.getvalue(), newline=""), "load.csv")
    assert f"load.csv line {number + 2}: {column}: {bad!r}; give " in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no request with tokens; give the columns arrival_seconds, prompt_tokens, output_tokens"),
        ("arrival_seconds,prompt_tokens,output_tokens\n", "no request with tokens"),
        ("when,prompt_tokens,output_tokens\n1,2,3\n", "line 2: columns 'when, prompt_tokens, output_tokens'; give the"),
        ("arrival_seconds,prompt_tokens,output_tokens\n1,2,3,4\n", "line 2: it has more fields than the header"),
        ("arrival_seconds,prompt_tokens,output_tokens\n1,2\n", "line 2: output_tokens: ''; give a number"),
        ("arrival_seconds,prompt_tokens,output_tokens\n1,2.5,3\n", "line 2: prompt_tokens: '2.5'; give a whole number"),
        (
            "arrival_seconds,prompt_tokens,output_tokens\n1,2,-3\n",
            "line 2: output_tokens: '-3'; give a whole",
        ),
        ("arrival_seconds,prompt_tokens,output_tokens\n1,2,10000001\n", "tokens from 0 to 10000000"),
        ('arrival_seconds,prompt_tokens,output_tokens\n1,"2,3\n', "line 2: "),
        ("arrival_seconds,prompt_tokens,output_tokens\n0,1,1\n40000000,1,1\n", "arrival_seconds spans 463 days; give"),
    ],
)
def test_a_file_that_is_not_a_load_is_refused_with_the_remedy(text: str, words: str) -> None:
    with pytest.raises(BacktestError) as refused:
        parse(io.StringIO(text, newline=""), "load.csv")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2026-11-16 18:00:01.2500000+02:00,3,4\n2026-11-16 16:00:00.0000000+00:00,1,2\n",
        ),
        (
            "mooncake.jsonl",
            '{"timestamp": 1250, "input_length": 3, "output_length": 4, "hash_ids": [1]}\n'
            '{"timestamp": 0, "input_length": 1, "output_length": 2}\n',
        ),
    ],
)
def test_the_benchmark_converts_published_traces(tmp_path: Path, name: str, text: str) -> None:
    trace, converted = tmp_path / name, tmp_path / "load.csv"
    trace.write_text(text)
    with converted.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *traces.requests(trace)])
    load = read(converted)
    assert load.arrival == pytest.approx([0, 1.25])
    assert (load.prompt.tolist(), load.output.tolist()) == ([1, 3], [2, 4])


def test_a_file_with_a_byte_order_mark_is_read_and_a_binary_file_is_refused(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_bytes(b"\xef\xbb\xbfarrival_seconds,prompt_tokens,output_tokens\r\n5,10,20\r\n")
    bad.write_bytes(b"\xff\xfe\x00")
    assert read(good).prompt.tolist() == [10]
    for file in (bad, tmp_path / "none.csv"):
        with pytest.raises(BacktestError, match=f"{file.name} cannot be read"):
            read(file)


def test_every_policy_gets_the_recorded_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance, out = np.random.default_rng(0), tmp_path / "rows.json"
    rows = [(i * 900, int(p), int(o)) for i, (p, o) in enumerate(chance.integers(20, 300, (400, 2)))]
    file = tmp_path / "chat.csv"
    file.write_text(written(rows))
    assert main(["--recorded", str(file), "--size", "2", "--policies", "pilot,max", "--json", str(out)]) == 0
    assert "chat: 800 requests in 0.13 h, mean prompt" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [(row["load"], row["policy"], row["finished"], row["lost"]) for row in found] == [
        ("chat", policy, 800, 0) for policy in ("pilot", "max")
    ]
