"""The price of a plan: by the hour, and by the million generated tokens."""

import pytest

from kvpilot_cli.plan.command import main

LOAD = ["--requests-per-second", "5", "--prompt-tokens", "2000", "--generated-tokens", "2000"]


def test_a_plan_is_priced_by_the_hour_and_by_the_million_tokens(capsys) -> None:
    plan = ["Llama-3.1-8B", "--gpu", "L40S", *LOAD]
    assert main([*plan, "--price", "1.1"]) == 0
    told = capsys.readouterr().out
    assert "1.1 an hour" in told
    row = next(line for line in told.splitlines() if line.startswith("k4v4") and "time per token" in line).split()
    assert row[2:5] == ["6", "6.60", "0.183"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([*LOAD, "--price", "-1"], "--price: '-1' is not a positive number"),
        ([*LOAD, "--price", "nan"], "--price: 'nan' is not a positive number"),
        ([*LOAD, "--price", "L40S=1"], "--price: 'L40S=1' is not a positive number"),
        (["--price", "1"], "--requests-per-second and --prompt-tokens and --generated-tokens: missing"),
    ],
)
def test_a_wrong_price_of_a_plan_is_refused_in_one_line(capsys, more, said) -> None:
    assert main(["Llama-3.1-8B", "--gpu", "L40S", *more]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
