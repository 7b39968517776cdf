"""`kvpilot-serve` whose vLLM process is forked from one that has already imported vLLM.

`python -P -m support.forked_serve ADDRESS ARGUMENTS...` stays alive, passes signals on, and exits with vLLM's status.
Use it for tests that need engines but do not test their start. tests/e2e/test_demo.py starts engines as users do.
"""

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import yaml

from kvpilot_localcluster.engines import real
from kvpilot_localcluster.images import DEFAULT_TABLE
from kvpilot_runtime import serve
from support.own_process import QUIET, address, begin, status

# vLLM reads these variables during its import, so an engine that sets them is not forked.
_READ = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE")
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def engine(
    model: Path, dtype: str, folder: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> Iterator[real.Engine]:
    """Run an engine as `kvpilot_localcluster.engines.real.engine` does, but forked."""
    with real.engine(model, dtype, folder, *arguments, env=env, serve=str(_program(folder))) as running:
        yield running


def images(folder: Path) -> Path:
    """Return the local cluster's image table with forked engines."""
    found = yaml.safe_load(DEFAULT_TABLE.read_text())
    for image in found["images"]:
        if image["entrypoint"] == ["kvpilot-serve"]:
            image["path"].insert(0, str(_program(folder).parent))
    table = folder / "images.yaml"
    table.write_text(yaml.safe_dump(found))
    return table


def _program(folder: Path) -> Path:
    program = folder / "bin" / "kvpilot-serve"
    program.parent.mkdir(exist_ok=True)
    command = shlex.join([sys.executable, "-P", "-m", "support.forked_serve", address()])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
    return program


def _become(where: str, program: str, command: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace os.execve: fork vLLM instead."""
    if any(environment.get(name) != QUIET[name] for name in _READ):
        _execve(program, command, environment)
    assert command[:3] == [sys.executable, "-P", "-m"]
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    with begin(where, command[3], command[4:], environment, [0, 1, 2]) as told:
        for one in _PASSED_ON:
            signal.signal(one, lambda number, _: told.sendall(bytes([number])))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        code = status(told)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


_execve = os.execve

if __name__ == "__main__":
    vars(os)["execve"] = partial(_become, sys.argv[1])
    sys.exit(serve.main(sys.argv[2:]))
