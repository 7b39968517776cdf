"""Engines that exchange pages, each in its own process."""

import json
import os
import select
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.own_process import HANGS, QUIET, address, begin, status

LEAVE = {"do_remote_decode": True, "do_remote_prefill": False}
"""Transfer parameters of a request whose prompt is prefilled for another engine."""


class Apart:
    """Engine (`apart_engine`, or another `module` like it) in its own process."""

    def __init__(self, folder: Path, name: str, module: str, **environment: str) -> None:
        self.log_file, where = folder / f"{name}.log", folder / f"{name}.socket"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        variables = {
            **os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(sys.path), "KVPILOT_PREFILL_FROM_PAGES": "1",
            "KVPILOT_CALIBRATION": "off", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), **environment,
        }  # fmt: skip
        with socket.socket(socket.AF_UNIX) as listener, self.log_file.open("w") as log, Path(os.devnull).open() as no:
            listener.bind(str(where))
            listener.listen()
            streams = [no.fileno(), log.fileno(), log.fileno()]
            self.process = begin(address(), module, [str(where)], variables, streams)
            if not select.select([listener], [], [], HANGS)[0]:
                raise TimeoutError(self.log)
            self.line = listener.accept()[0]
        self.lines = self.line.makefile("r")
        self.started: dict[str, Any] = {}

    @property
    def log(self) -> str:
        """Return everything that the engine has printed."""
        return self.log_file.read_text(errors="replace")

    def tell(self, what: str, **arguments: Any) -> None:
        """Send a question without waiting for the answer."""
        self.line.sendall(json.dumps([what, arguments]).encode() + b"\n")

    def hear(self) -> Any:
        """Wait for the answer to the oldest open question, and return it.

        Raises:
            RuntimeError: the engine has ended. The message has the end of its output.
        """
        if select.select([self.line], [], [], HANGS)[0]:
            if said := self.lines.readline():
                return json.loads(said)
            with suppress(RuntimeError):  # its end is known already
                status(self.process)  # an engine closes the connection before it logs why it ends
        raise RuntimeError(self.log[-8000:])

    def ask(self, what: str, **arguments: Any) -> Any:
        """Send a question, and return the answer."""
        self.tell(what, **arguments)
        return self.hear()

    def kill(self) -> None:
        """Kill the engine, like a failing node."""
        self.process.sendall(bytes([9]))
        status(self.process)

    def end(self) -> None:
        """Close the connection, which makes the engine end."""
        self.lines.close()
        self.line.close()
        self.process.close()


@contextmanager
def engines(
    model: Path, *each: tuple[dict[str, Any], dict[str, str]], module: str = "apart_engine"
) -> Iterator[list[Apart]]:
    """Yield engines with these options of vLLM and these environment variables."""
    with TemporaryDirectory() as folder:
        started = []
        try:
            for number, (options, environment) in enumerate(each):
                started.append(engine := Apart(Path(folder), str(number), module, **environment))
                engine.tell("start", model=str(model), options=options)
                engine.started = engine.hear()
            yield started
        finally:
            for engine in started:
                engine.end()
