"""The fleet's simulation by intervals agrees with the simulation by requests, and each pilot decides every minute."""

import json
import sys
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from kvpilot_cli.backtest.buckets import FINE
from kvpilot_cli.backtest.costs import load_profile
from kvpilot_cli.backtest.loads import cut, synthetic
from kvpilot_cli.backtest.pilot import load_spec
from kvpilot_cli.backtest.service import Objective, Service
from kvpilot_operator.api.spec import Spec
from kvpilot_operator.state.histogram import Histogram

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.backtest.fleet import Pods, main, run_fleet, services
from benchmarks.backtest.interval import Fleet
from benchmarks.backtest.moments import measure

PROFILE = load_profile()
DTYPES = ("auto", "fp8", "k8v4", "k4v4")


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load_spec(None)


@pytest.mark.parametrize(
    ("name", "dtype", "replicas", "size"),
    [("chat", "auto", 2, 0.2), ("chat", "k4v4", 1, 0.3), ("rag", "fp8", 2, 0.5), ("agents", "k4v4", 2, 0.8)],
)
def test_the_interval_model_stays_within_its_stated_error(name: str, dtype: str, replicas: int, size: float) -> None:
    load = cut(synthetic(name, 1, 3, size), 10 * 3600, 2400)
    service = Service(PROFILE, load, dtype, replicas, objective=Objective(), start_seconds=240, timeout=120)
    uses = []
    while service.now < load.seconds:
        service.advance(service.now + 60)
        sample = service.scrape(dtype)
        assert sample is not None
        uses.append(sample.usage)
    ttft = service.outcome.ttft.take()

    copies = 16
    fleet = Fleet(PROFILE, [measure(load, PROFILE.of(dtype))] * copies, DTYPES, 120, 0, 5.0, 0.06, FINE)
    at = np.full(copies, DTYPES.index(dtype))
    model = [fleet.step(np.full(copies, r), np.full(copies, float(replicas)), at, 6).usage.mean() for r in load.rate]
    half = len(uses) // 2
    assert abs(mean(model[half:]) - mean(uses[half:])) <= max(0.05, 0.35 * mean(uses[half:]))
    finished = fleet.total["finished"].mean()
    assert finished == pytest.approx(service.outcome.finished, rel=0.12)
    counted = Histogram(FINE, tuple(fleet.ttft.sum(axis=0)))
    assert counted.quantile(0.5) == pytest.approx(ttft.quantile(0.5), rel=0.4)
    assert 0.3 <= counted.quantile(0.95) / ttft.quantile(0.95) <= 2.0


def test_a_fleet_is_the_same_for_the_same_seed(spec: Spec) -> None:
    figures = [
        run_fleet(services(4, 0.1, 2), policy, spec, PROFILE, Objective(), 3) for policy in ("pilot", "bf16-hpa") * 2
    ]
    assert figures[:2] == figures[2:]


def test_the_pilots_of_a_fleet_are_asked_every_minute_and_change_it(spec: Spec) -> None:
    rows = run_fleet(services(4, 0.2, 5), "pilot", spec, PROFILE, Objective(), 1)
    assert rows[0].asked == 4 * 288  # minutes
    assert sum(row.scalings for row in rows)


def test_pods_answer_after_their_start_and_the_youngest_go_first() -> None:
    pods = Pods(np.array([2]))
    pods.scale(np.array([4]))
    assert (pods.ready[0], pods.asked[0]) == (2, 4)
    pods.pass_minute()
    pods.scale(np.array([5]))
    pods.scale(np.array([3]))
    for _ in range(3):
        pods.pass_minute()
    assert (pods.ready[0], pods.asked[0]) == (3, 3)
    pods.scale(np.array([1]))
    assert (pods.ready[0], pods.asked[0]) == (1, 1)


def test_a_fleet_says_which_policy_runs_and_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "fleet.json"
    monkeypatch.setattr("sys.argv", ["fleet", "--services=4", "--days=0.05", "--policies", "max", "--json", str(out)])
    main()
    shown = capsys.readouterr()
    assert shown.err == "max: policy 1 of 1 runs\n"
    assert [line.split()[:3] for line in shown.out.splitlines()[:2]] == [
        ["load", "policy", "services"], ["agents", "max", "1"],
    ]  # fmt: skip
    assert len(json.loads(out.read_text())) == 4


def test_a_fleet_without_one_service_of_each_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fleet", "--services=2"])
    with pytest.raises(SystemExit):
        main()
