"""Loopback addresses and ports for pods and Services. Clusters on this machine never share an address or a port."""

import contextlib
import random
import socket
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from kvpilot_localcluster.errors import LocalClusterError, StartFailed

UNUSED_SERVICE = "127.126.255.254"
"""Loopback address that no Service uses, to try whether a port is free and allowed."""
_MOST_HELD = 64
# Locks of the ports that were returned last. Their new owners may not listen yet, so keep the ports reserved.
_held: deque[socket.socket] = deque()


def reserve(name: str, numbers: Iterable[int]) -> tuple[int, socket.socket]:
    """Lock the first number that no process on this machine has locked under this name.

    Return the number and its lock, a socket. Closing the socket releases the number.

    Raises:
        LocalClusterError: all numbers are locked.
    """
    for number in numbers:
        # An abstract socket serves as a lock. The kernel releases it even if its owner is killed.
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0{name}-{number}")
        except OSError:
            lock.close()
        else:
            return number, lock
    raise LocalClusterError(f"all numbers of {name} are taken on this machine: end some local clusters")


def service_port(port: int) -> int:
    """Return the port at which the local cluster serves a Service's `port`: the same, or 20000 more if it is forbidden.

    Usually only root may listen on ports below 1024. The administrator may allow other users to do so, too.
    """
    with socket.socket() as sock:
        try:
            sock.bind((UNUSED_SERVICE, port))
        except PermissionError:
            return port + 20000
        except OSError:
            return port
    return port


class Addresses:
    """Pool of the loopback addresses 127.0.B.1 to 127.0.B.254. Each node agent on this machine has its own B."""

    def __init__(self, folder: Path) -> None:
        self._used: set[str] = set()
        self._last = 0
        kept = folder / "block"
        preferred = [int(kept.read_text())] if kept.exists() else []
        self._block, self._lock = reserve("kvpilot-localcluster", [*preferred, *range(1, 255)])
        kept.write_text(str(self._block))

    def take(self, address: str | None = None) -> str:
        """Take this address from the pool, or any free one. An address that was just released is not reused at once."""
        if address is None:
            for _ in range(254):
                self._last = self._last % 254 + 1
                address = f"127.0.{self._block}.{self._last}"
                if address not in self._used:
                    break
        if address is None:
            raise AssertionError
        self._used.add(address)
        return address

    def release(self, address: str) -> None:
        """Return an address to the pool, so that another pod may get it."""
        self._used.discard(address)


def free_port(address: str = "127.0.0.1") -> int:
    """Return a free TCP port that was not returned to anyone on this machine recently.

    The port is below the kernel's range for outgoing connections. Any client could take a port within that range before
    the new owner listens, and an engine takes a minute until it listens.

    Raises:
        StartFailed: none of the tried ports is free.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(lowest // 2, lowest), min(100, lowest // 2)):
        with socket.socket() as sock, contextlib.suppress(OSError, LocalClusterError):
            sock.bind((address, port))
            _held.append(reserve("kvpilot-port", [port])[1])
            if len(_held) > _MOST_HELD:
                _held.popleft().close()
            return port
    raise StartFailed(f"no free port among 100 of {lowest // 2} to {lowest - 1} on {address}: end what listens there")
