"""The backtest runs one load under every policy and prints a report. Its benchmark adds rivals and verdicts."""

import json
import sys
from pathlib import Path

import pytest

from kvpilot_cli.backtest import main, report
from kvpilot_cli.backtest.compare import POLICIES, Row, by_pilot, run, run_all, with_objectives
from kvpilot_cli.backtest.costs import BacktestError, load_profile
from kvpilot_cli.backtest.loads import cut, synthetic
from kvpilot_cli.backtest.pilot import load_spec
from kvpilot_cli.backtest.service import Objective, Service

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.backtest import rivals, verdicts
from benchmarks.backtest.rivals import RIVALS

EVERY = {**POLICIES, **RIVALS}


def row(policy: str, gpu_hours: float, good: int, lost: int = 0, finished: int = 1000) -> Row:
    return Row("chat", policy, gpu_hours, finished, good, lost, 1, 1, 0.1, 0.1, 1, 0, 0, 0)


@pytest.mark.parametrize(
    ("pilot", "other", "word"),
    [
        ((10, 1000), (20, 1000), "ahead"),
        ((20, 1000), (10, 1000), "behind"),
        ((10, 1000), (10.1, 1000), "equal"),
        ((20, 1000), (10, 900), "ahead"),  # the other policy does not serve the load
        ((10, 900), (20, 1000), "behind"),
        ((10, 900), (20, 950), "behind"),  # neither policy serves the load: more good requests wins
        ((10, 900), (20, 905), "ahead"),  # equally many good requests: the lower price wins
        ((10, 0), (20, 0), "equal"),
    ],
)
def test_the_verdict_compares_good_requests_first_and_then_cost(
    pilot: tuple[float, int], other: tuple[float, int], word: str
) -> None:
    assert verdicts.judge(row("pilot", *pilot), row("max", *other)) == word


def test_no_request_of_the_load_is_lost_by_the_router() -> None:
    load = cut(synthetic("chat", 1, 1, 0.2), 0, 1200)
    asked = sum(1 for _ in load.sessions())
    service = Service(load_profile(), load, "auto", 2, objective=Objective(), start_seconds=60, timeout=120)
    for step in range(40):
        service.advance(service.now + 60)
        # When replicas come and go, sessions move to the remaining ones.
        service.scale("auto", 1 + step % 3)
    turns = sum(len(s.turns) for s in load.sessions())
    assert asked > 100
    assert service.outcome.finished + service.outcome.lost == turns


def test_a_replica_costs_from_its_request_until_its_last_answer() -> None:
    load = cut(synthetic("rag", 1, 1, 0.1), 0, 600)
    service = Service(load_profile(), load, "auto", 1, objective=Objective(), start_seconds=240, timeout=120)
    service.advance(100)
    service.scale("auto", 2)
    service.advance(200)
    assert len(service.ready("auto")) == 1
    assert service.outcome.gpu_seconds == pytest.approx(100 + 2 * 100)
    service.advance(400)
    assert len(service.ready("auto")) == 2


def test_a_simulated_run_is_the_same_for_the_same_seed() -> None:
    spec, profile = load_spec(None), load_profile()
    load = cut(synthetic("agents", 1, 2, 0.3), 0, 1800)
    first, second = (run(load, "pilot", by_pilot, spec, profile, Objective()) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", EVERY)
def test_every_policy_drives_a_load_within_the_bounds_of_the_spec(name: str) -> None:
    spec, profile = load_spec(None), load_profile()
    load = cut(synthetic("chat", 1, 1, 0.3), 12 * 3600, 1800)
    row = run(load, name, EVERY[name], spec, profile, Objective())
    turns = sum(len(session.turns) for session in load.sessions())
    assert row.finished + row.lost <= turns
    assert row.finished > 0.5 * turns
    assert 0.5 * spec.scaling.min_replicas <= row.gpu_hours <= 0.5 * (spec.scaling.max_replicas + 1)


def test_parallel_runs_return_rows_in_order_and_report_each_end(capsys: pytest.CaptureFixture[str]) -> None:
    spec, profile, load = load_spec(None), load_profile(), cut(synthetic("rag", 1, 1, 0.1), 0, 600)
    jobs = [(load, name, EVERY[name], spec, profile, Objective()) for name in ("max", "bf16-hpa")]
    assert [row.policy for row in run_all(jobs)] == ["max", "bf16-hpa"]
    ends = [f"backtest: {ended} of 2 runs have ended" for ended in (1, 2)]
    assert capsys.readouterr().err.splitlines() == ends
    assert run_all(jobs[:1])[0].policy == "max"


def test_the_table_of_the_backtest_fits_the_terminal() -> None:
    text = report.terminal([row("pilot", 10, 1000), row("max", 20, 1000)], Objective())
    assert max(map(len, text.splitlines())) <= 120
    assert "A good request has its first token within 5 s and on average at most 60 ms" in text


def test_the_benchmark_gives_a_verdict_for_each_load_and_over_all() -> None:
    rows = [row("pilot", 10, 1000), row("max", 20, 1000), row("bf16-hpa", 5, 900), row("bf16-wva", 10, 1000)]
    text = rivals.markdown(rows, Objective())
    assert text.startswith("| load | policy | GPU-hours |")
    assert "chat: served by the pilot (100.00% good), ahead of max, bf16-hpa; equal to bf16-wva" in text
    assert text.splitlines()[-1] == (
        "- Verdict: the pilot serves 1 of 1 loads; of 3 comparisons: 2 ahead, 1 equal, 0 behind"
    )
    assert "99% of the requests are good" in text
    assert verdicts.summary(rows[1:]) == ""


def test_the_limits_of_a_good_request_become_the_pilots_objectives() -> None:
    asked = with_objectives(load_spec(None), Objective(ttft=2.5, itl=0.04)).scaling.objectives
    assert [(one.metric, one.percentile, one.milliseconds) for one in asked] == [("TTFT", 99, 2500), ("ITL", 95, 40)]


def test_the_backtest_command_writes_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.json"
    arguments = ["--trace", "rag", "--days", "0.01", "--size", "0.1", "--policies", "pilot"]
    assert main([*arguments, "--json", str(out)]) == 0
    assert "GPU-hours" in capsys.readouterr().out
    assert json.loads(out.read_text())[0]["policy"] == "pilot"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trace", "nope"], "trace: 'nope' is unknown"),
        (["--days", "0"], "days: 0.0; give more"),
        (["--seed", "-1"], "seed: -1; give a whole number from 0 on"),
        (["--recorded", "x.csv", "--days", "2"], "days: 2.0 has no effect with --recorded; leave out one of the two"),
        (["--recorded", "/does/not/exist.csv"], "recorded: /does/not/exist.csv cannot be read"),
        (["--size", "nan"], "size: nan; give a number above 0"),
        (["--ttft", "nan"], "ttft: nan; give a number above 0"),
        (["--itl", "-5"], "itl: -5.0; give a number above 0"),
        (["--json", "/does/not/exist.json"], "json: /does/not/exist.json: its folder does not exist; make it first"),
        (["--service", "/does/not/exist.yaml"], "service: /does/not/exist.yaml cannot be read"),
        (["--profile", "/does/not/exist.json"], "profile: /does/not/exist.json cannot be read"),
    ],
)
def test_bad_input_ends_the_command_with_field_value_and_remedy(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


def test_a_manifest_that_breaks_the_rules_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("apiVersion: kvpilot.io/v1alpha1\nkind: QuantizedLLMService\nmetadata: {name: x}\nspec: {}\n")
    with pytest.raises(BacktestError, match=r"service: spec\.model"):
        load_spec(path)
