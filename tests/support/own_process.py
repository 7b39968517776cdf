"""vLLM in its own process: a module of this package reads a question as JSON and prints the answer as its last line.

The process is forked from one that has imported vLLM (`support.vllm_forks`). It always ends when its caller ends.
"""

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, TemporaryFile, mkdtemp
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HANGS = 1200
"""Time limit in seconds: ten times as long as the longest question takes."""

FORKS = "support.vllm_forks"
"""Module that a server runs. It forks a process for each question."""

QUIET = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


@dataclass
class _Server:
    """A server process that forks other processes on request, and its address."""

    process: subprocess.Popen[bytes]
    address: str


_servers: dict[frozenset[tuple[str, str]], _Server] = {}
_turn, _starting = threading.Lock(), threading.Lock()


def ask(module: str, asked: "DataclassInstance | list[Any] | dict[str, Any]", **environment: str) -> Any:
    """Run a module's `main` in its own process with the question `asked`, and return its answer.

    Raises:
        RuntimeError: the process failed. The message has the end of its output.
    """
    code, out, err = run(module, asked, **environment)
    if code:
        # Take a long end of stderr, because leak warnings follow the error message.
        raise RuntimeError(out[-2000:] + err[-10_000:])
    return json.loads(out.splitlines()[-1])


def run(
    module: str, asked: "DataclassInstance | list[Any] | dict[str, Any]", **environment: str
) -> tuple[int, str, str]:
    """Run a module as `ask` does. Return its exit status, stdout and stderr, even after a failure."""
    # Let prefills read quantized pages, unless the question says otherwise.
    variables = {**_quiet(), "KVPILOT_PREFILL_FROM_PAGES": "1", **environment}
    with TemporaryDirectory() as folder, _turn:
        question, *said = (Path(folder) / name for name in ("question", "out", "err"))
        question.write_text(json.dumps(asked if isinstance(asked, list | dict) else asdict(asked)))
        with question.open() as stdin, said[0].open("w") as out, said[1].open("w") as err:
            streams = [stdin.fileno(), out.fileno(), err.fileno()]
            with begin(_server(variables), module, [], variables, streams) as told:
                if not select.select([told], [], [], HANGS)[0]:
                    raise subprocess.TimeoutExpired(module, HANGS)
                code = status(told)
        return code, said[0].read_text(errors="replace"), said[1].read_text(errors="replace")


def address() -> str:
    """Return the address at which any process may `begin` another one, with the variables of small engines."""
    return _server(_quiet())


def begin(
    address: str, module: str, arguments: list[str], environment: Mapping[str, str], streams: list[int]
) -> socket.socket:
    """Start a process in this folder.

    Each byte sent over the returned socket is a signal for the process. `status` reads its exit status from there.

    Args:
        address: address of a server (`support.vllm_forks`).
        module: module whose `main` the process runs.
        arguments: command-line arguments of the module.
        environment: all environment variables.
        streams: file descriptors of stdin, stdout and stderr.
    """
    about = {"module": module, "arguments": arguments, "where": str(Path.cwd()), "environment": dict(environment)}
    conversation = socket.socket(socket.AF_UNIX)
    conversation.connect(address)
    with TemporaryFile("w") as question:
        json.dump(about, question)
        question.flush()
        question.seek(0)
        socket.send_fds(conversation, [b"?"], [question.fileno(), *streams])
    return conversation


def status(conversation: socket.socket) -> int:
    """Return the process's exit status, or the negative number of the signal that ended it."""
    if not (said := conversation.recv(16)):
        raise RuntimeError("the process that has imported vLLM is gone")
    return int(said)


def _quiet() -> dict[str, str]:
    return {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(sys.path)}


def _server(variables: Mapping[str, str]) -> str:
    """Return the address of a server with this environment. Ignore variables that vLLM's import does not read."""
    late = ("KVPILOT_", "PYTEST_CURRENT_TEST", "VLLM_KV_CACHE_LAYOUT")
    early = {name: value for name, value in variables.items() if not name.startswith(late)}
    kind = frozenset(early.items())
    with _starting:
        if kind not in _servers:
            atexit.register(end)
            _servers[kind] = _start(early)
        return _servers[kind].address


def _start(variables: Mapping[str, str]) -> _Server:
    where = str(Path(mkdtemp(prefix="kvpilot-forks-")) / "ask")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(where)
        listener.listen()
        number = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", FORKS, str(number)], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, env=variables, pass_fds=[number], start_new_session=True,
        )  # fmt: skip
    return _Server(process, where)


def end() -> None:
    """Stop all servers. The processes that they forked end with them."""
    while _servers:
        _, server = _servers.popitem()
        server.process.kill()  # the kernel also kills processes that the server forked
        server.process.wait()
        rmtree(Path(server.address).parent, ignore_errors=True)
