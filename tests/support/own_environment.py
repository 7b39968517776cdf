"""What a process that `support.own_process` asks has found before its question; it then makes a mess, or waits."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.own_process import ask


@dataclass
class Asked:
    """`waits`: the answer never comes; its process writes its number to a file first."""

    waits: str = ""


@dataclass
class Told:
    """Its environment and folder; modules of ours that are there at its start; whether another's mess is there."""

    environment: dict[str, str]
    folder: str
    ours: list[str]
    mess: bool
    number: int
    asker: int


def serve(waits: str = "", **environment: str) -> Told:
    """Ask one."""
    return Told(**ask("support.own_environment", Asked(waits), **environment))


def main() -> None:
    """Answer stdin."""
    asked = Asked(**json.load(sys.stdin))
    if asked.waits:
        Path(asked.waits).write_text(f"{os.getpid()}\n")
        time.sleep(100_000)
    ours = [name for name in sys.modules if name.startswith("kvpilot_")]
    import vllm.entrypoints.llm
    import vllm.envs

    there: dict[str, Any] = vars(vllm.envs)
    told = Told(dict(os.environ), str(Path.cwd()), ours, "KVPILOT_MESS" in there, os.getpid(), os.getppid())
    there["KVPILOT_MESS"] = os.environ["KVPILOT_MESS"] = "1"
    import kvpilot_runtime.plugin

    kvpilot_runtime.plugin.register()
    print(json.dumps(asdict(told)), flush=True)


if __name__ == "__main__":
    main()
