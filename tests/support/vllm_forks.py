"""A process that has imported vLLM. It forks itself for each caller, so that no test's engine has to import vLLM again.

`python -m support.vllm_forks FD` listens at the socket FD. A caller sends four files: a question in JSON (see `become`)
and the new process's stdin, stdout and stderr. Any byte that follows is a signal for the new process. When the new
process has ended, the answer is its exit status. If it starts a process by `spawn`, this one is forked, too, from a
process in its initial state.

No kvpilot module is imported before the environment of a question is set, and questions do not affect each other. A
forked process ends with its caller. All forked processes end when this process's stdin is closed.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import context, forkserver, resource_tracker, spawn
from pathlib import Path
from shutil import rmtree
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
# Modules that `vllm serve` and `vllm.LLM` import before they read their arguments, and that our plugin inspects.
IMPORTED = (
    "vllm.entrypoints.llm", "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.serve", "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_model_runner",
)  # fmt: skip


def main() -> None:
    """Fork a process for each caller until stdin is closed."""
    before = dict(os.environ)
    for module in IMPORTED:
        importlib.import_module(module)
    own = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()  # a garbage collection in a child then copies none of the current pages
    vars(gc)["unfreeze"] = lambda: None  # vLLM calls gc.unfreeze after an engine's end
    parent = os.getpid()
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        folder = Path(listener.getsockname()).parent
        question = answer_all(listener)
    leave(lambda: become(own, folder, parent, **question))


def leave(do: Callable[[], None]) -> NoReturn:
    """Call `do` and exit as a normal process would, but leave the freeing of memory to the kernel."""
    code = 0
    try:
        do()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, before exit functions run
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def answer_all(listener: socket.socket) -> dict[str, Any]:
    """Fork a process for each caller. Only a forked process returns, with the caller's question."""
    # Process of each connection, and a file that becomes readable when the process ends.
    running: dict[socket.socket, tuple[int, int]] = {}
    while True:
        ends = {ended: asker for asker, (_, ended) in running.items()}
        sources: list[Any] = [0, listener, *ends, *running]
        ready = select.select(sources, [], [])[0]
        if 0 in ready:
            rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
            os._exit(0)  # the kernel kills its forked processes, too
        for one in ready:
            if one is listener:
                asker = listener.accept()[0]
                if not (files := socket.recv_fds(asker, 1, 4)[1]):
                    asker.close()
                elif pid := os.fork():
                    with suppress(OSError):  # the process may have ended by itself
                        os.setpgid(pid, pid)
                    running[asker] = (pid, os.pidfd_open(pid))
                    _close(files)
                else:
                    os.setpgid(0, 0)
                    for other in (asker, *running):
                        other.close()
                    _close([ended for _, ended in running.values()])
                    return _take(files)
            elif one in ends and ends[one] in running:
                asker = ends[one]
                pid = running.pop(asker)[0]
                _kill(pid)  # kill its remaining children
                with suppress(OSError):
                    asker.sendall(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                asker.close()
                os.close(one)
            elif one in running:
                try:
                    said = one.recv(1)
                except ConnectionError:
                    said = b""
                pid, ended = running[one]
                if said:
                    os.kill(pid, said[0])
                else:  # the caller has closed its connection
                    _kill(pid)
                    os.waitpid(pid, 0)
                    del running[one]
                    one.close()
                    os.close(ended)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _take(files: list[int]) -> dict[str, Any]:
    """Return the question. The other three files become this process's stdin, stdout and stderr."""
    about, *streams = files
    with os.fdopen(about) as text:
        question: dict[str, Any] = json.load(text)
    for number, file in enumerate(streams):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0)
    return question


def become(
    own: dict[str, str], sockets: Path, parent: int,
    module: str, arguments: list[str], where: str, environment: dict[str, str],
) -> None:  # fmt: skip
    """Become `python -P -m module ARGUMENTS`, as if started that way in the folder `where`.

    Args:
        own: variables that vLLM's import sets by itself.
        sockets: a folder that only this user can read.
        parent: id of the process that forked this one. This process ends with it.
        environment: all environment variables; those in `own` take precedence.
    """
    _die_with(parent)
    os.chdir(where)
    os.environ.clear()
    os.environ.update({**environment, **own})
    more = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in more if folder and folder not in sys.path]
    fork_what_is_spawned(sockets / str(os.getpid()))
    found = importlib.import_module(module)
    sys.argv = [str(found.__file__), *arguments]
    found.main()


def fork_what_is_spawned(address: Path) -> None:
    """Let multiprocessing's `spawn` fork a copy of this process, through the standard library's fork server.

    Unlike other processes of a fork server, these get the current environment of their parent, as with `spawn`.
    """
    described, prepared = spawn.get_preparation_data, spawn.prepare
    server: Any = forkserver._forkserver
    contexts: Any = context._concrete_contexts  # type: ignore[attr-defined]
    parent = os.getpid()

    def describe(name: str) -> dict[str, Any]:
        return {**described(name), "environment": dict(os.environ)}

    def prepare(data: Mapping[str, Any]) -> None:
        _die_with(parent)
        os.environ.clear()
        os.environ.update(data["environment"])
        prepared(data)

    spawn.get_preparation_data, spawn.prepare = describe, prepare
    contexts["spawn"] = contexts["forkserver"]
    # Start only the resource tracker: this process replaces the fork server.
    server.ensure_running = resource_tracker.ensure_running
    server._forkserver_address = str(address)
    watched, server._forkserver_alive_fd = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        if not os.fork():
            _die_with(parent)
            parent = os.getpid()
            os.close(server._forkserver_alive_fd)
            try:
                forkserver.main(listener.detach(), watched, [])
            finally:
                os._exit(0)
    os.close(watched)


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends in any way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
