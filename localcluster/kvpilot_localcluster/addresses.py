"""Loopback addresses for pods, each given to one pod of this machine at a time."""

from __future__ import annotations

import socket
from pathlib import Path

from kvpilot_localcluster.errors import LocalClusterError


class Addresses:
    """Hands out loopback addresses 127.0.B.1 to 127.0.B.254, B a block that no other agent of this machine holds."""

    def __init__(self, folder: Path) -> None:
        self._used: set[str] = set()
        self._last = 0
        kept = folder / "block"
        preferred = [int(kept.read_text())] if kept.exists() else []
        for block in [*preferred, *range(1, 255)]:
            # An abstract socket is a lock that the kernel releases, however its holder ends.
            self._lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._lock.bind(f"\0kvpilot-localcluster-{block}")
            except OSError:
                self._lock.close()
                continue
            self._block = block
            kept.write_text(str(block))
            return
        raise LocalClusterError("254 node agents run on this machine already: end some")

    def take(self, address: str | None = None) -> str:
        """A free address, or the given one, now in use. Addresses are not used again at once."""
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
        """Give an address back."""
        self._used.discard(address)
