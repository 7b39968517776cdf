"""vLLM in a process of its own: a module of this package gets a question as JSON, and its last line is the answer.

`python -m support.own_process` has imported vLLM and becomes a new process for each question, by fork(): importing it
takes longer than a small engine does for all else. Nothing of kvpilot is imported in it before the question's own
environment is there, and nothing that a question does is seen by the next. Nothing of it outlives who asks, however
that one ends: its stdin is then closed.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HANGS = 1200
"""Seconds, ten times what the longest question takes."""

QUIET = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
_servers: dict[frozenset[tuple[str, str]], subprocess.Popen[bytes]] = {}
_turn = threading.Lock()


def ask(module: str, asked: DataclassInstance | list[Any], **environment: str) -> Any:
    """What `main` of a module answers, with these variables beside what keeps an engine small and offline.

    Raises:
        RuntimeError: it ended in an error, with the end of what it said.
    """
    code, out, err = run(module, asked, **environment)
    if code:
        raise RuntimeError(out[-2000:] + err[-10_000:])  # what is wrong comes before what leaks at the end
    return json.loads(out.splitlines()[-1])


def run(module: str, asked: DataclassInstance | list[Any], **environment: str) -> tuple[int, str, str]:
    """Like `ask`, however it ended: the exit status, and all that it said on stdout and stderr."""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    # Prompts read themselves back, unless a question says otherwise.
    variables = {**os.environ, **QUIET, **path, "KVPILOT_PREFILL_FROM_PAGES": "1", **environment}
    with TemporaryDirectory() as folder, _turn:
        question = Path(folder) / "question"
        question.write_text(json.dumps(asked if isinstance(asked, list) else asdict(asked)))
        try:
            about = {"module": module, "folder": folder, "where": str(Path.cwd()), "environment": variables}
            code = _answer(_server(variables), about)
        except BaseException:
            end()
            raise
        said = [(Path(folder) / name).read_text(errors="replace") for name in ("out", "err")]
        return code, said[0], said[1]


def _server(variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """One that was started with the same variables, but for those that nobody reads while vLLM is imported."""
    late = ("KVPILOT_", "PYTEST_CURRENT_TEST")
    early = {name: value for name, value in variables.items() if not name.startswith(late)}
    kind = frozenset(early.items())
    if kind not in _servers:
        atexit.register(end)
        _servers[kind] = subprocess.Popen(
            [sys.executable, "-P", "-m", "support.own_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=early, start_new_session=True,
        )  # fmt: skip
    return _servers[kind]


def _answer(server: subprocess.Popen[bytes], question: dict[str, Any]) -> int:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(question).encode() + b"\n")
    server.stdin.flush()
    if not select.select([server.stdout], [], [], HANGS)[0]:
        raise subprocess.TimeoutExpired(question["module"], HANGS)
    if not (line := server.stdout.readline()):
        raise RuntimeError("the process that has imported vLLM is gone")
    return int(line)


def end() -> None:
    """Nothing of the processes that are asked, nor of one that answers, outlives this."""
    while _servers:
        _, server = _servers.popitem()
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def main() -> None:
    """Answer each line of stdin in a process of its own; say its exit status once it has ended."""
    before = dict(os.environ)
    import vllm.entrypoints.llm  # noqa: F401  (this is what takes long)

    own = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()  # so that a collection in a child copies no page of what is here
    for line in sys.stdin.buffer:
        question = json.loads(line)
        if not (child := os.fork()):
            _become(own, **question)
            return
        print(_status(child), flush=True)


def _status(child: int) -> int:
    """That of a process that has ended. Who asks says no more until then: what can be read of stdin is its end."""
    ended = os.pidfd_open(child)
    if sys.stdin.buffer in select.select([ended, sys.stdin.buffer], [], [])[0]:
        os.killpg(0, signal.SIGKILL)
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become(own: dict[str, str], module: str, folder: str, where: str, environment: dict[str, str]) -> None:
    """Be the process that answers: as if it had been started so. `own`: what vLLM's import sets by itself."""
    os.chdir(where)
    os.environ.clear()
    os.environ.update({**environment, **own})
    for name, number, flags in (
        ("question", 0, os.O_RDONLY), ("out", 1, os.O_WRONLY | os.O_CREAT), ("err", 2, os.O_WRONLY | os.O_CREAT)
    ):  # fmt: skip
        file = os.open(Path(folder) / name, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0)
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
