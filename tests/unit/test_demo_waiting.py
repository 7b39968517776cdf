"""The demo waits as long as it sees progress, and reports what it saw."""

from copy import deepcopy
from typing import Any

import pytest

from kvpilot_demo.observation import Observation, Patience, work_lines
from kvpilot_demo.screen import Screen, service_row
from kvpilot_demo.story import BAD, GOOD, Record
from kvpilot_demo.summary import summary
from kvpilot_operator.cluster.objects import Object

STATUS: dict[str, Any] = {
    "conditions": [{"type": "Ready", "status": "False", "reason": "EnginesStarting"}],
    "kvCache": {"activeDtype": "auto", "usagePercent": 40, "capacityTokens": 2816},
    "canary": {"dtype": GOOD, "stage": "Starting", "revision": "b"},
}


def pod(name: str, *, ready: bool = False) -> Object:
    return {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": str(ready)}]}}


def test_a_step_of_the_demo_fails_only_after_a_long_time_without_progress() -> None:
    patience = Patience(seconds=10)
    assert not patience.ended("a", 100)
    assert not patience.ended("a", 109)
    assert not patience.ended("b", 111)
    assert not patience.ended("b", 120)
    assert patience.ended("b", 121)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("canary", "stage"), "Probing"),
        (("canary", "message"), "asked again"),
        (("kvCache", "activeDtype"), GOOD),
        (("conditions",), [{"type": "Ready", "status": "True", "reason": "Serving"}]),
        (("history",), [{"dtype": BAD}]),
        (("accuracy",), {"baseline": {"identity": "x"}}),
    ],
)
def test_every_step_of_the_operator_counts_as_progress(path: tuple[str, ...], value: Any) -> None:
    later = deepcopy(STATUS)
    here = later
    for name in path[:-1]:
        here = here[name]
    here[path[-1]] = value
    assert Observation(later).sign != Observation(STATUS).sign


def test_new_pods_and_work_of_engines_count_as_progress() -> None:
    before = Observation(STATUS, [pod("a")], 10)
    assert Observation(STATUS, [pod("a"), pod("b")], 10).sign != before.sign
    assert Observation(STATUS, [pod("a", ready=True)], 10).sign != before.sign
    assert Observation(STATUS, [pod("a")], 11).sign != before.sign


def test_a_fluctuating_figure_of_the_status_does_not_count_as_progress_of_the_demo() -> None:
    later = deepcopy(STATUS)
    later["kvCache"]["usagePercent"] = 41
    assert Observation(later).sign == Observation(STATUS).sign


def test_regular_reads_of_health_and_metrics_do_not_count_as_progress() -> None:
    log = 'INFO loading\nINFO: 127.0.0.1 - "GET /metrics HTTP/1.1" 200 OK\nINFO: "POST /v1/completions HTTP/1.1" 200\n'
    assert work_lines(log) == 2


def test_the_output_shows_progress_while_waiting() -> None:
    seen = Observation(STATUS, [pod("a", ready=True), pod("b")])
    assert seen.summary == f"1 of 2 engines ready, canary {GOOD} Starting, EnginesStarting"


def test_the_table_has_the_service_its_canary_and_the_load() -> None:
    row = dict(service_row({"metadata": {"name": "smollm2"}, "status": STATUS}, None))
    assert (row["KV CACHE"], row["HOLDS"], row["CACHE USED"]) == ("auto", "2,816 tokens", "40%")
    assert row["ON TRIAL"] == f"{GOOD}: Starting"
    assert service_row(None, None) == []


def test_plain_lines_are_not_repeated_for_fluctuating_figures(capsys: pytest.CaptureFixture[str]) -> None:
    screen, later = Screen(plain=True), deepcopy(STATUS)
    later["kvCache"]["usagePercent"] = 90
    for status in (STATUS, STATUS, later):
        screen.show({"metadata": {"name": "smollm2"}, "status": status}, None)
    assert capsys.readouterr().out.count("SERVICE smollm2") == 1


def test_an_event_takes_one_line_of_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(plain=True).event("CanaryStarted", "auto -> k4v4:\n" + "memory " * 100)
    (line,) = capsys.readouterr().out.splitlines()
    assert "CanaryStarted: auto -> k4v4: memory" in line
    assert line.endswith("...")


def test_the_summary_has_problem_change_gain_mistake_and_rollback() -> None:
    record = Record(
        capacity_before=2816, capacity_after=10880, requests=48, bad_answers="asked: Q | 16-bit: A | k2v2: B"
    )
    record.good_probe = {"excessKLMicronats": 1800, "top1AgreementPermille": 979}
    record.bad_probe = {"excessKLMicronats": 700_000, "top1AgreementPermille": 500}
    record.final_dtype = GOOD
    told = summary(record, limit=20)
    assert [title for title, _ in told[:5]] == ["Problem", "Change", "Gain", "Mistake", "Caught"]
    texts = dict(told[:5])
    assert "damage 1.8 of 20 allowed" in texts["Change"]
    assert "3.9 times" in texts["Gain"]
    assert "damage 700.0 of 20 allowed" in texts["Caught"]
    assert "never got a user's request" in texts["Caught"]
    assert [text for title, text in told[5:]] == ["asked: Q", "16-bit: A", "k2v2: B"]
