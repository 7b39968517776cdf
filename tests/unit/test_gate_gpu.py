"""The program that runs many gates on one GPU: verdicts and figures of pairs of engines."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.engine.users import Turn
from benchmarks.gate import gpu, record
from benchmarks.gate.gpu import Pair, seeded
from kvpilot_probes import packs
from support.probe_engine import Body, Handler, Writer, counting, engine, noisy, reading


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(record, "versions", dict)
    monkeypatch.setattr(sys, "argv", ["gpu", "--model", "m", "--out", str(tmp_path / "gates.json")])
    return gpu.arguments()


def judged(args: Any, canary: Handler) -> dict[str, Any]:
    """Run one gate between a sound engine and the engine `canary`, and return the gate's entry in the output file."""

    async def story() -> None:
        async with engine(reading(2048)) as stable, engine(reading(2048, canary)) as other:
            pair = Pair(args, record.Record(args), stable, other)
            await pair.gate(22)
            await pair.scraper.close()

    asyncio.run(story())
    (gate,) = json.loads(args.out.read_text())["gates"]
    return dict(gate)


def test_a_sound_canary_passes_every_stage_and_a_damaged_one_ends_before_the_pressure(options: Any) -> None:
    sound, damaged = judged(options, counting), judged(options, noisy)
    assert (sound["verdict"], damaged["verdict"]) == ("Passed", "Failed")
    assert list(sound["stages"]) == ["capture", "control", "measure", "pressure"]
    assert "pressure" not in damaged["stages"]
    low, high = damaged["bounds"]
    assert low < damaged["excess_kl_millinats"] < high
    assert sound["excess_kl_millinats"] == 0
    assert sum(bucket["judged"] for bucket in sound["buckets"].values()) == sound["prompts"]


def test_an_engine_that_refuses_fails_only_its_own_gate(options: Any) -> None:
    async def refusing(path: str, body: Body, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 500 Internal Server Error\r\nconnection: close\r\n\r\n")

    gate = judged(options, refusing)
    assert (gate["verdict"], gate["reason"]) == ("Error", "EngineRefused")


def test_each_seed_changes_the_beginning_of_every_written_prompt() -> None:
    plain = packs.load(["builtin/general", "builtin/structured"])
    first, second = seeded(plain, 20), seeded(plain, 22)
    for one, other, before in zip(first, second, plain, strict=True):
        assert one.messages[0].content != other.messages[0].content
        assert one.messages[-1].content.endswith(before.messages[-1].content)


def test_a_serving_canary_is_probed_without_pressure_and_one_request_at_a_time(options: Any) -> None:
    options.serving, at_once, most = True, 0, 0

    async def canary(path: str, body: Body, writer: Writer) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await counting(path, body, writer)
        at_once -= 1

    gate = judged(options, canary)
    assert (gate["verdict"], list(gate["stages"])) == ("Passed", ["capture", "control", "measure"])
    assert most == 1


async def test_latencies_of_each_period_count_only_questions_and_pauses_within_it(options: Any) -> None:
    pair = Pair(options, record.Record(options), "", "")
    pair.alone, pair.beside = [(0.0, 10.0)], [(10.0, 20.0)]
    turns = [Turn(sent=1.0, chunks=[1.5, 1.6, 1.7]), Turn(sent=11.0, chunks=[13.0, 14.0])]
    found = pair.latencies(turns)
    await pair.scraper.close()
    assert [found[name]["questions"] for name in ("alone", "beside")] == [1, 1]
    assert [found[name]["pauses"] for name in ("alone", "beside")] == [2, 1]
    assert found["alone"]["ttft"][1] == pytest.approx(0.5)
    assert found["beside"]["itl"][1] == pytest.approx(1.0)
