"""Output of `kvpilot probe` for people: progress on a terminal, and bars of damage by position."""

import asyncio
import json
import os
import pty
import re
import sys
from contextlib import suppress

import pytest

from kvpilot_cli.probe import command
from support.probe_engine import Body, Writer, completing, counting, engine, event, respond, serving, stream, tokens_of

GENERAL = ("--probe-set", "builtin/general")
GARBAGE = completing(event("token_id:7777", {"token_id:7777": -0.01, "token_id:7778": -9.0}))


async def probe(*arguments: str) -> int:
    return await asyncio.to_thread(command.main, arguments)


async def waning(path: str, body: Body, writer: Writer) -> None:
    """Answer like `counting`, but less certain as the context grows. The tokens are the same."""
    if path == "/tokenize":
        respond(writer, tokens_of(body))
        return
    start = len(body["prompt"])
    sure = ((t, -0.1 if t < 256 else -0.2 if t < 512 else -0.5) for t in range(start, start + body["max_tokens"]))
    stream(writer, *(event(f"token_id:{t}", {f"token_id:{t}": p, "token_id:9999": -3.0}) for t, p in sure))


async def test_bars_show_which_kind_of_prompts_is_damaged(capsys: pytest.CaptureFixture[str]) -> None:
    # Send one request at a time. Each run then ends after the same prompts, once the damage is certain.
    usual = (*GENERAL, "--probe-set", "builtin/structured", "--probe-set", "builtin/multi-turn", "--concurrency", "1")
    async with engine(serving(counting, "m")) as one, engine(serving(waning, "m")) as other:
        await probe("--baseline", one, "--candidate", other, *usual)
        said = capsys.readouterr().out
        await probe("--baseline", one, "--candidate", other, *usual, "--json")
    seen = json.loads(capsys.readouterr().out)["measured"]["seen"]
    damage = {
        name: [kl for bucket, kl, _ in seen if bucket == name] for name in ("general", "structured", "multi-turn")
    }
    means = {name: 1000 * sum(found) / len(found) for name, found in damage.items()}
    table = {line.split()[0]: line.split()[1:] for line in said.split("same choice")[1].splitlines()[1:4]}
    for name, mean in means.items():
        count, shown, _, *bar = table[name]
        assert (int(count), shown) == (len(damage[name]), f"{mean:,.1f}")
        assert abs(len("".join(bar)) - 24 * mean / max(means.values())) <= 0.5
    assert "#" * 24 in said and "#" * 25 not in said


class Terminal:
    """Pseudo-terminal for a process's stderr. `shown` is the text that a person would see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ours, theirs = pty.openpty()
        self._stream = os.fdopen(theirs, "w")
        monkeypatch.setattr(sys, "stderr", self._stream)
        self._reader = asyncio.create_task(asyncio.to_thread(self._read))

    async def shown(self) -> str:
        self._stream.close()
        return await self._reader

    def _read(self) -> str:
        found = b""
        # Linux reports EIO once the other side is closed.
        with suppress(OSError):
            while part := os.read(self._ours, 4096):
                found += part
        os.close(self._ours)
        return found.decode()


async def test_a_terminal_shows_progress_on_one_line_that_disappears_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(serving(counting, "m")) as one, engine(serving(counting, "m")) as other:
        terminal = Terminal(monkeypatch)
        assert await probe("--baseline", one, "--candidate", other, *GENERAL) == 0
        shown = await terminal.shown()
    lines = [line.removesuffix("\033[K") for line in shown.split("\r")]
    stages = [line.partition(":")[0] for line in lines if line]
    assert list(dict.fromkeys(stages)) == ["baseline", "control", "candidate"]
    for stage in ("baseline", "control", "candidate"):
        counts = [int(line.split()[1]) for line in lines if re.fullmatch(rf"{stage}: \d+ answers and tokens", line)]
        assert f"{stage}: starts" in lines
        assert counts == sorted(set(counts)) and counts[-1] >= 8 * 32
    assert shown.endswith("\r\033[K") and "\n" not in shown
    assert "\033" not in capsys.readouterr().out


async def test_progress_is_shown_only_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    async with engine(serving(counting, "m")) as one, engine(serving(counting, "m")) as other:
        assert await probe("--baseline", one, "--candidate", other, *GENERAL) == 0
    assert capsys.readouterr().err == ""
