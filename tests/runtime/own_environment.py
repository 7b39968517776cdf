"""Report the environment of this process to a test of `support.own_process`, and then change its state or wait."""

import importlib
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from support.own_process import ask
from support.vllm_forks import IMPORTED


@dataclass
class Asked:
    """Request. If `waits` names a file, the process does not answer, but writes its own ID and its child's ID to it."""

    waits: str = ""


@dataclass
class Told:
    """Report of a process: environment, folder, our modules at its start, and whether it sees others' changes.

    `spawned` is the report of a process that it spawns after its own changes.
    """

    environment: dict[str, str]
    folder: str
    ours: list[str]
    mess: bool
    number: int
    asker: int
    spawned: list[Any]


def serve(waits: str = "", **environment: str) -> Told:
    """Start a process that sets up its own environment variables, and return its report."""
    return Told(**ask("own_environment", Asked(waits), **environment))


def main() -> None:
    """Answer the request on stdin."""
    asked = Asked(**json.load(sys.stdin))
    spawn = multiprocessing.get_context("spawn")
    if asked.waits:
        other = spawn.Process(target=time.sleep, args=(100_000,))
        other.start()
        Path(asked.waits).write_text(f"{os.getpid()} {other.pid}\n")
        time.sleep(100_000)
    ours = _ours()
    for module in IMPORTED:
        importlib.import_module(module)
    there: dict[str, Any] = vars(sys.modules["vllm.envs"])
    before, mess = dict(os.environ), "KVPILOT_MESS" in there
    there["KVPILOT_MESS"] = os.environ["KVPILOT_MESS"] = "1"
    import kvpilot_runtime.plugin

    answers: SimpleQueue[list[Any]] = spawn.SimpleQueue()
    other = spawn.Process(target=_say, args=(answers,))
    other.start()
    spawned = answers.get()
    other.join()
    kvpilot_runtime.plugin.register()
    told = Told(before, str(Path.cwd()), ours, mess, os.getpid(), os.getppid(), [*spawned, other.exitcode])
    print(json.dumps(asdict(told)), flush=True)


def _ours() -> list[str]:
    return [name for name in sys.modules if name.startswith("kvpilot_")]


def _say(answers: SimpleQueue[list[Any]]) -> None:
    there = vars(sys.modules["vllm.envs"]) if "vllm.envs" in sys.modules else {}
    answers.put([dict(os.environ), str(Path.cwd()), _ours(), "KVPILOT_MESS" in there])


if __name__ == "__main__":
    main()
