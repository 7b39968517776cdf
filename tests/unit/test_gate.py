"""`kvpilot probe` gives the operator's verdict on two endpoints, with exit codes and messages about wrong arguments.

Both endpoints are real HTTP servers here.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpilot_cli import command as commands
from kvpilot_cli.probe import command, report
from support.probe_engine import Body, Handler, Writer, completing, counting, engine, event, noisy, respond, serving

DOCS = Path(__file__).parents[2] / "docs" / "accuracy-gate.md"
GENERAL = ("--probe-set", "builtin/general")
GARBAGE = completing(
    event("token_id:7777", {"token_id:7777": -0.01, "token_id:7778": -9.0}).replace(b'"text": "x"', b'"text": "y"')
)


async def probe(*arguments: str) -> int:
    return await asyncio.to_thread(command.main, arguments)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


async def test_an_engine_with_equal_answers_passes(capsys: pytest.CaptureFixture[str]) -> None:
    async with engine(serving(counting, "m")) as one, engine(serving(counting, "m")) as other:
        assert await probe("--baseline", one, "--candidate", other, *GENERAL) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("Passed: WithinLimits: excess KL 0.0 millinats (limit 20)")
    assert f"candidate  m at {other}" in said


async def test_an_engine_that_answers_garbage_fails_and_the_output_shows_where(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with engine(serving(counting, "m")) as one, engine(serving(GARBAGE, "m")) as other:
        assert await probe("--baseline", one, "--candidate", other, *GENERAL) == 1
    said = capsys.readouterr().out
    assert "Failed: AccuracyRegressed" in said.splitlines()[-1]
    assert "the prompt that suffered most" in said
    assert "0.0%" in said


async def test_the_baselines_own_noise_does_not_count_as_damage_of_the_candidate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loose = ("--max-excess-kl-millinats", "1000", "--min-top1-agreement-percent", "80")
    async with engine(serving(noisy, "m")) as one, engine(serving(noisy, "m")) as other:
        assert await probe("--baseline", one, "--candidate", other, "--json", *loose, *GENERAL) == 0
    found = document(capsys)
    assert found["control"]["top1_agreement_permille"] < 950
    assert found["measured"]["top1_agreement_permille"] == found["control"]["top1_agreement_permille"]
    assert found["excess_kl_micronats"] == 0
    async with engine(serving(counting, "m")) as one, engine(serving(noisy, "m")) as other:
        assert await probe("--baseline", one, "--candidate", other, *GENERAL) == 1


@pytest.mark.parametrize("candidate", [counting, noisy, GARBAGE])
async def test_a_baseline_with_noise_beyond_the_limits_gives_no_verdict(
    candidate: Handler, capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(serving(noisy, "m")) as one, engine(serving(candidate, "m")) as other:
        assert await probe("--baseline", one, "--candidate", other, *GENERAL) == 3
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("Inconclusive: BaselineUnfit: the 16-bit engine differs from its own answers")


@pytest.mark.parametrize(
    ("connector", "loaded", "code", "said"),
    [
        ("", GARBAGE, 0, "covered    general; "),
        ("OffloadingConnector", counting, 0, "covered    general, from-OffloadingConnector; "),
        ("OffloadingConnector", GARBAGE, 1, "Failed: AccuracyRegressed: from-OffloadingConnector: "),
        ("NixlConnector", GARBAGE, 0, "covered    general; not: from-NixlConnector; "),
    ],
    ids=["not named", "sound", "damaged", "only loads pages of others"],
)
async def test_pages_that_the_candidate_loads_through_its_connector_are_judged_on_their_own(
    capsys: pytest.CaptureFixture[str], connector: str, loaded: Handler, code: int, said: str
) -> None:
    marked: list[int] = []

    async def handler(path: str, body: Body, writer: Writer) -> None:
        if path == "/metrics":
            page = f"vllm:kv_cache_usage_perc 0.5\nvllm:external_prefix_cache_hits_total {sum(marked)}\n"
            respond(writer, page.encode())
            return
        through = body.get("kv_transfer_params") == {"kvpilot_from_connector": True}
        marked.extend([len(body["prompt"])] * through)
        await (loaded if through else counting)(path, body, writer)

    async with engine(serving(counting, "m")) as one, engine(serving(handler, "m")) as other:
        named = ("--candidate-connector", connector) if connector else ()
        assert await probe("--baseline", one, "--candidate", other, *named, *GENERAL) == code
    assert said in capsys.readouterr().out
    assert bool(marked) is (connector == "OffloadingConnector")


async def test_a_gate_with_too_few_positions_is_inconclusive(tmp_path: Path) -> None:
    pack = tmp_path / "one.yaml"
    pack.write_text("prompts:\n- name: only\n  messages:\n  - {role: user, content: What is the capital of France?}\n")
    async with engine(counting) as one, engine(counting) as other:
        named = ("--baseline-model", "m", "--candidate-model", "m")
        assert await probe("--baseline", one, "--candidate", other, *named, "--prompts", str(pack)) == 3


async def test_options_set_the_gates_limits(capsys: pytest.CaptureFixture[str]) -> None:
    async with engine(serving(counting, "m")) as one, engine(serving(noisy, "m")) as other:
        loose = ("--max-excess-kl-millinats", "30000", "--min-top1-agreement-percent", "50")
        assert await probe("--baseline", one, "--candidate", other, "--json", *loose, *GENERAL) == 0
    assert document(capsys)["limits"] == {"max_excess_kl_millinats": 30_000, "min_top1_agreement_percent": 50}


async def test_the_gates_json_keeps_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    async with engine(serving(counting, "m")) as one, engine(serving(counting, "n")) as other:
        await probe("--baseline", f"{one}/v1/", "--candidate", other, "--json", *GENERAL)
    found = document(capsys)
    assert set(found) == {
        "verdict", "reason", "message", "covered", "excess_kl_micronats", "limits", "baseline", "candidate", "control",
        "measured",
    }  # fmt: skip
    assert found["baseline"] == {"url": one, "model": "m", "prompts": 8, "positions": 256, "left_out": []}
    assert found["candidate"] == {"url": other, "model": "n"}
    assert {"mean_kl_micronats", "p99_kl_micronats", "top1_agreement_permille", "seen"} <= set(found["measured"])


async def test_an_api_key_is_sent_only_to_its_endpoint_and_never_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANDIDATES_KEY", "s3cr3t")
    ours: list[str] = []
    theirs: list[str] = []
    async with engine(serving(counting, "m"), ours) as one, engine(serving(GARBAGE, "m"), theirs) as other:
        key = ("--candidate-key-variable", "CANDIDATES_KEY")
        assert await probe("--baseline", one, "--candidate", other, *key, *GENERAL) == 1
    assert all("Authorization: Bearer s3cr3t" in head for head in theirs)
    assert not any("Authorization" in head for head in ours)
    said = capsys.readouterr()
    assert "s3cr3t" not in said.out + said.err


async def test_an_endpoint_with_several_models_needs_a_model_name(capsys: pytest.CaptureFixture[str]) -> None:
    async with engine(serving(counting, "a", "b")) as one, engine(serving(counting, "m")) as other:
        assert await probe("--baseline", one, "--candidate", other, *GENERAL) == 2
        assert f"--baseline {one} serves a, b: name one with --baseline-model" in capsys.readouterr().err
        assert await probe("--baseline", one, "--baseline-model", "a", "--candidate", other, *GENERAL) == 0


async def test_an_unreachable_or_invalid_engine_gives_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    async def web(path: str, body: Body, writer: Writer) -> None:
        respond(writer, b"<html>", "404 Not Found")

    async with engine(serving(counting, "m")) as one:
        assert await probe("--baseline", one, "--candidate", "http://127.0.0.1:1", *GENERAL) == 2
        assert "is the engine running?" in capsys.readouterr().err
        async with engine(web) as other:
            assert await probe("--baseline", one, "--candidate", other, *GENERAL) == 2
        assert "HTTP 404" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "the following arguments are required: --baseline, --candidate"),
        (("--baseline", "engine:8000", "--candidate", "http://b"), "--baseline 'engine:8000' is not the address"),
        (("--baseline", "http://a:99999", "--candidate", "http://b"), "--baseline 'http://a:99999': Port out of range"),
        (("--baseline", "http://me:s3cr3t@a", "--candidate", "http://b"), "give the key by --baseline-key-variable"),
        (("--baseline", "http://a?key=s3cr3t", "--candidate", "http://b"), "give the key by --baseline-key-variable"),
        (("--probe-set", "builtin/all"), "--probe-set: 'builtin/all' is unknown; use builtin/general"),
        (("--probe-set", "configmap/mine"), "give the pack's file with --prompts"),
        (("--prompts", "/nowhere.yaml"), "--prompts '/nowhere.yaml' cannot be read"),
        (("--tokens", "4"), "--tokens: '4': give a whole number from 8 to 128"),
        (("--min-top1-agreement-percent", "101"), "give a whole number from 0 to 100"),
        (("--max-excess-kl-millinats", "-1"), "--max-excess-kl-millinats: "),
        (("--candidate-key-variable", "NO_SUCH_KEY"), "this environment variable is not set"),
    ],
)
def test_a_wrong_argument_is_one_line_with_the_remedy_and_no_request(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    given = arguments if "--baseline" in arguments or not arguments else (
        "--baseline", "http://127.0.0.1:1", "--candidate", "http://127.0.0.1:1", *arguments
    )  # fmt: skip
    assert command.main(given) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.startswith("kvpilot probe: ") and printed.err.count("\n") == 1
    assert printed.out == ""
    assert "s3cr3t" not in printed.err


async def test_an_error_of_the_command_itself_has_another_exit_code_than_a_regression(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("broken")

    monkeypatch.setattr(report, "text", broken)
    async with engine(serving(counting, "m")) as one:
        assert await probe("--baseline", one, "--candidate", one, *GENERAL) == 2


async def test_a_reader_who_leaves_before_the_verdict_gets_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    program = Path(sys.executable).with_name("kvpilot")
    async with engine(serving(counting, "m")) as one, engine(serving(counting, "m")) as other:
        asked = (program, "probe", "--baseline", one, "--candidate", other, *GENERAL)
        # An unbuffered stdout hits the broken pipe at the print, a buffered one only at the process's end.
        for more in ({}, {"PYTHONUNBUFFERED": "1"}):
            started = await asyncio.create_subprocess_exec(
                *asked, stdout=write, stderr=subprocess.PIPE, env={**os.environ, **more}
            )
            _, said = await started.communicate()
            assert (started.returncode, said) == (141, b"")
    os.close(write)


def test_probe_is_a_command_of_kvpilot(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["probe", "--help"])
    assert ended.value.code == 0
    assert "Exit codes: 0 passed, 1 regressed" in capsys.readouterr().out


def test_the_documented_options_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    options = set(re.findall(r"^  (--[a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE))
    documented = set(re.findall(r"`(--[a-z0-9-]+)", DOCS.read_text())) | {"--baseline", "--candidate"}
    assert options == documented
