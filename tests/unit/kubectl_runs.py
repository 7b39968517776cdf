"""A loopback API server with one service, and `kubectl kvpilot` run against it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from loopback_api import LoopbackApi

from kvpilot_kubectl.main import main
from support.services import manifest

Run = Callable[..., tuple[int, str, str]]
COMMANDS = ("abort", "export", "pause", "promote", "resume", "retry", "status", "why")


@contextmanager
def serving_chat(folder: Path) -> Iterator[LoopbackApi]:
    """Start the server, with its client configuration in a folder."""
    with LoopbackApi(folder) as api:
        api.services["chat"] = manifest()
        yield api


def runner(api: LoopbackApi, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command against `api`, and returns exit code, stdout and stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = main([*argv, "--kubeconfig", str(api.kubeconfig)])
        return code, *capsys.readouterr()

    return run


def denied(*dtypes: str) -> dict[str, Any]:
    entries = [
        {"dtype": one, "reason": "AccuracyRegressed", "message": "", "until": "2999-01-01T00:00:00Z"} for one in dtypes
    ]
    return {"kvCache": {"activeDtype": "auto", "denied": entries}}


def refused(run: Run, *argv: str, code: int = 1) -> str:
    """Return the only line that the failed command prints on stderr."""
    ended, out, err = run(*argv)
    assert (ended, out) == (code, "")
    (line,) = err.splitlines()
    assert line.startswith("kubectl kvpilot: ")
    return line


def on_trial(stage: str) -> dict[str, Any]:
    started = "2026-11-27T12:00:00Z"
    about = {"dtype": "k4v4", "fromDtype": "auto", "revision": "3740aaaa", "startedTime": started, "stageTime": started}
    return {"canary": {**about, "stage": stage}}


def tried(verdict: str, reason: str = "PerformanceRegressed") -> dict[str, Any]:
    about = {"dtype": "k4v4", "fromDtype": "auto", "revision": "3740aaaa", "time": "2026-11-27T12:09:00Z"}
    return {"history": [{**about, "verdict": verdict, "reason": reason}]}
