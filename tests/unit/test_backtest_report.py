"""The backtest runs one load under every policy, compares the results and prints a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpilot_cli.backtest import main, report
from kvpilot_cli.backtest.compare import POLICIES, Row, run, with_objectives
from kvpilot_cli.backtest.costs import BacktestError, load_profile
from kvpilot_cli.backtest.loads import cut, synthetic
from kvpilot_cli.backtest.pilot import load_spec
from kvpilot_cli.backtest.service import Objective, Service


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
def test_the_verdict_is_service_first_and_then_price(
    pilot: tuple[float, int], other: tuple[float, int], word: str
) -> None:
    assert report.judge(row("pilot", *pilot), row("max", *other)) == word


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


def test_a_replica_is_paid_for_from_its_order_until_it_is_empty() -> None:
    load = cut(synthetic("rag", 1, 1, 0.1), 0, 600)
    service = Service(load_profile(), load, "auto", 1, objective=Objective(), start_seconds=240, timeout=120)
    service.advance(100)
    service.scale("auto", 2)
    service.advance(200)
    assert len(service.ready("auto")) == 1
    assert service.outcome.gpu_seconds == pytest.approx(100 + 2 * 100)
    service.advance(400)
    assert len(service.ready("auto")) == 2


def test_a_run_is_the_same_for_the_same_seed() -> None:
    spec, profile = load_spec(None), load_profile()
    load = cut(synthetic("agents", 1, 2, 0.3), 0, 1800)
    assert run(load, "pilot", spec, profile, Objective()) == run(load, "pilot", spec, profile, Objective())


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_drives_a_load_within_the_bounds_of_the_spec(name: str) -> None:
    spec, profile = load_spec(None), load_profile()
    load = cut(synthetic("chat", 1, 1, 0.3), 12 * 3600, 1800)
    row = run(load, name, spec, profile, Objective())
    turns = sum(len(session.turns) for session in load.sessions())
    assert row.finished + row.lost <= turns
    assert row.finished > 0.5 * turns
    assert 0.5 * spec.scaling.min_replicas <= row.gpu_hours <= 0.5 * (spec.scaling.max_replicas + 1)


def test_what_makes_a_request_good_becomes_the_pilots_objectives() -> None:
    asked = with_objectives(load_spec(None), Objective(ttft=2.5, itl=0.04)).scaling.objectives
    assert [(one.metric, one.percentile, one.milliseconds) for one in asked] == [("TTFT", 99, 2500), ("ITL", 95, 40)]


def test_the_command_writes_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "x.json", tmp_path / "x.md"
    arguments = ["--trace", "rag", "--days", "0.01", "--size", "0.1", "--policies", "pilot"]
    assert main([*arguments, "--json", str(out), "--report", str(page)]) == 0
    assert "GPU-hours" in capsys.readouterr().out
    assert json.loads(out.read_text())[0]["policy"] == "pilot"
    assert page.read_text().startswith("| load | policy |")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trace", "nope"], "trace: 'nope' is unknown"),
        (["--days", "0"], "days: 0.0; give more"),
        (["--prometheus", "http://127.0.0.1:9"], "query-range: None; give START,END"),
        (["--services", "2"], "services: 2; give at least 4"),
        (["--services", "0"], "services: 0; give at least 4"),
        (["--seed", "-1"], "seed: -1; give a whole number from 0 on"),
        (["--query-range", "1,2"], "query-range: '1,2' has no effect without --prometheus; give both or none"),
        (["--history", "x.json", "--selector", 'a="b"'], "selector: 'a=\"b\"' has no effect without --prometheus"),
        (["--history", "x.json", "--days", "2"], "days: 2.0 has no effect with --history; leave out one of the two"),
        (["--history", "x.json", "--size", "2"], "size: 2.0 has no effect with --history; leave out one of the two"),
        (["--recorded", "x.csv", "--days", "2"], "days: 2.0 has no effect with --recorded; leave out one of the two"),
        (["--recorded", "x.csv", "--seed", "2"], "seed: 2 has no effect with --recorded; leave out one of the two"),
        (["--services", "4", "--recorded", "x.csv"], "recorded: 'x.csv' has no effect with --services; leave out one"),
        (["--recorded", "/does/not/exist.csv"], "recorded: /does/not/exist.csv cannot be read"),
        (["--prometheus", "http://p", "--size", "2"], "size: 2.0 has no effect with --prometheus; leave out one"),
        (["--services", "4", "--trace", "rag"], "trace: 'rag' has no effect with --services; leave out one of the two"),
        (["--services", "4", "--history", "x.json"], "history: 'x.json' has no effect with --services; leave out one"),
        (["--services", "4", "--prometheus", "http://p"], "prometheus: 'http://p' has no effect with --services"),
        (["--services", "4", "--size", "2"], "size: 2.0 has no effect with --services; leave out one of the two"),
        (["--services", "4", "--journal"], "journal: True has no effect with --services; leave out one of the two"),
        (["--services", "4", "--report", "x.md"], "report: 'x.md' has no effect with --services; leave out one"),
        (["--services", "4", "--plot", "x.svg"], "plot: 'x.svg' has no effect with --services; leave out one"),
        (["--services", "4", "--requests-target", "8"], "requests-target: 8.0 has no effect with --services; leave"),
        (["--policies", "pilot,max", "--requests-target", "8"], "requests-target: 8.0 has no effect without a policy"),
        (
            ["--policies", "max,wva", "--journal"],
            "journal: True has no effect without a policy that keeps one; add pilot",
        ),
        (["--requests-target", "0"], "requests-target: 0.0; give a number above 0"),
        (["--requests-target", "nan"], "requests-target: nan; give a number above 0"),
        (["--size", "nan"], "size: nan; give a number above 0"),
        (["--ttft", "nan"], "ttft: nan; give a number above 0"),
        (["--itl", "-5"], "itl: -5.0; give a number above 0"),
        (["--json", "/does/not/exist.json"], "json: /does/not/exist.json: its folder does not exist; make it first"),
        (["--plot", "/does/not/exist.svg"], "--plot '/does/not/exist.svg': its folder does not exist; make it first"),
        (["--plot", "plot.txt"], "--plot 'plot.txt': the suffix must be .svg or .png"),
        (["--services", "4", "--policies", "wva"], "policies: 'wva' is not for fleets; use pilot"),
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
