"""Verdicts of the benchmarks `gpu_families` (model families) and `gpu_options` (options of vLLM)."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.accuracy.gpu_families_judge import COMPUTED, RIGHT, verdict
from benchmarks.accuracy.gpu_options_judge import fits, sleep_row

SOUND = {
    "errors": {},
    "auto/crowded from auto/alone": {"mean_kl": 0.001, "not_a_number": 0},
    "k4v4/alone from auto/alone": {"mean_kl": 0.1, "not_a_number": 0},
    "k4v4/crowded from k4v4/alone": {"mean_kl": 0.09, "not_a_number": 0},
    "auto/crowded from oracle auto": 0.001,
    "auto/crowded from oracle k4v4": 0.2,
    "k4v4/crowded from oracle auto": 0.15,
    "k4v4/codec from oracle k4v4": 0.02,
    "k4v4/codec from oracle auto": 0.2,
    "k4v4/codec from a misread block": 1.0,
    "oracle k4v4 rounded": 0.01,
}


def test_answers_equal_to_those_of_transformers_are_judged_right() -> None:
    assert verdict(SOUND) == RIGHT


@pytest.mark.parametrize(
    ("name", "value", "missing"),
    [
        ("auto/crowded from oracle auto", 0.1, "auto differs from transformers"),
        ("k4v4/codec from oracle k4v4", 0.06, "the codec differs from transformers"),
        ("auto/crowded from oracle auto", math.nan, "auto differs from transformers"),
        ("k4v4/codec from a misread block", 0.03, "a misread block would not be noticed"),
        ("k4v4/crowded from k4v4/alone", {"mean_kl": 0.2, "not_a_number": 0}, "a crowd changes answers"),
        ("k4v4/crowded from k4v4/alone", {"mean_kl": 0.0, "not_a_number": 1}, "logits are not numbers"),
        ("k4v4/crowded from oracle auto", 0.3, "window and factors do harm"),
    ],
)
def test_the_judgement_names_the_failed_comparison(name: str, value: object, missing: str) -> None:
    assert verdict({**SOUND, name: value}) == f"served, not shown right: {missing}"


@pytest.mark.parametrize("name", [name for name in SOUND if "oracle" in name and name != "oracle k4v4 rounded"])
def test_every_comparison_with_transformers_is_needed_for_a_pass(name: str) -> None:
    assert verdict({key: value for key, value in SOUND.items() if key != name}) != RIGHT


def test_an_engine_may_differ_by_as_much_as_rounding_of_codes() -> None:
    moved = {**SOUND, "k4v4/codec from oracle k4v4": 0.15}
    assert verdict(moved) != RIGHT
    assert verdict({**moved, "oracle k4v4 rounded": 0.05}) == RIGHT


def test_auto_may_differ_by_as_much_as_bfloat16_arithmetic() -> None:
    moved = {**SOUND, "auto/crowded from oracle auto": 0.07}
    assert verdict(moved) != RIGHT
    assert verdict({**moved, COMPUTED: 0.1}) == RIGHT


def test_an_engine_that_failed_is_not_served() -> None:
    assert verdict({**SOUND, "errors": {"k4v4/crowded": "no"}}) == "not served: k4v4/crowded: no"


def test_a_missing_alone_run_does_not_change_the_verdict_but_a_bad_alone_run_does() -> None:
    crowd = {name for name in SOUND if name.endswith("/alone")}
    without = {key: value for key, value in SOUND.items() if key not in crowd}
    assert verdict({**without, "errors": {"k4v4/alone": "it did not end in time"}}) == RIGHT
    assert verdict({**without, "k4v4/crowded from k4v4/alone": {"mean_kl": 0.0, "not_a_number": 0}}) != RIGHT


def answer(tokens: list[int], likely: float) -> dict[str, object]:
    return {"tokens": tokens, "logprobs": [{str(t): likely, "0": math.log(1 - math.exp(likely))} for t in tokens]}


def test_an_engine_whose_answers_change_after_sleep_fails() -> None:
    said = ["Sleep mode freed 1 GiB memory"]
    run = {"answers": [answer([5], -0.1)], "again": [answer([5], -0.1)], "woken": [answer([5], -0.1)], "said": said}
    assert sleep_row({"k4v4/alone": run})["verdict"] == RIGHT
    assert "change after sleep" in sleep_row({"k4v4/alone": {**run, "woken": [answer([5], -0.5)]}})["verdict"]
    assert "has not slept" in sleep_row({"k4v4/alone": {**run, "said": []}})["verdict"]


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ('{"city": "Oslo", "warm": false, "days": 9}', True),
        ('{"city": "Oslo", "warm": false, "days": 10}', False),
        ('{"city": "Oslo", "warm": 0, "days": 9}', False),
        ('{"city": "Oslo", "warm": true}', False),
        ('{"city": "Oslo", ', False),
        ("[]", False),
    ],
)
def test_an_answer_is_checked_against_its_json_schema(text: str, held: bool) -> None:
    assert fits(text) is held
