"""LMCache's cache server, which runs in its own process."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STARTS = 300
"""Time limit of a start in seconds: ten times the usual time."""


class Server:
    """LMCache server that listens at `port`."""

    def __init__(self, log: Path, *options: str) -> None:
        self.port, *others = _free_ports(3)
        ports = [f"--{name}={port}" for name, port in zip(("port", "http-port", "prometheus-port"),
                                                          (self.port, *others), strict=True)]  # fmt: skip
        small = ["--l1-size-gb=0.25", "--l1-init-size-gb=1", "--eviction-policy=LRU", "--disable-observability"]
        mode = ["--chunk-size=32", "--supported-transfer-mode=engine_driven"]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LMCACHE_TRACK_USAGE": "false"}
        with log.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lmcache.cli.main", "server", *ports, *small, *mode, *options],
                env=variables, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip
        until = time.monotonic() + STARTS
        while "cache server is running" not in log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > until:
                self.end()
                raise RuntimeError(log.read_text(errors="replace")[-4000:])
            time.sleep(0.2)

    def end(self) -> None:
        """Kill the server, like a failing node."""
        self.process.kill()
        self.process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def server(folder: Path, *options: str) -> Iterator[Server]:
    """Yield a server that ends with the `with` block."""
    one = Server(folder / "lmcache.log", *options)
    try:
        yield one
    finally:
        one.end()
