"""Address that engines and downloads listen at."""

from __future__ import annotations

import os
import socket

HOST = "KVPILOT_SERVE_HOST"
"""Environment variable with another address, for several pods that share one machine's addresses."""


def host() -> str:
    """Return the variable's address, or the one that covers all addresses of IPv4 and IPv6.

    A cluster may have either family alone: 0.0.0.0 is not reachable where pods have IPv6 addresses only.
    """
    return os.environ.get(HOST) or ("::" if _takes_both_families() else "0.0.0.0")  # noqa: S104 - pods serve all


def _takes_both_families() -> bool:
    """Return True if a socket at :: also gets IPv4: not without IPv6, nor with net.ipv6.bindv6only."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
            return not probe.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    except OSError:
        return False
