"""The address that engines and downloads listen at."""

from __future__ import annotations

import os
import socket

HOST = "KVPILOT_SERVE_HOST"
"""Variable that names another address, where several pods share the addresses of one machine."""


def host() -> str:
    """Return the variable's address, or the one that stands for all addresses of IPv4 and IPv6.

    A cluster may have either family alone: what listens at 0.0.0.0 is not reached where pods have IPv6 addresses only.
    """
    return os.environ.get(HOST) or ("::" if _takes_both_families() else "0.0.0.0")  # noqa: S104 - pods serve all


def _takes_both_families() -> bool:
    """Return True where a socket at :: is reached by IPv4, too: not without IPv6, nor with net.ipv6.bindv6only."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
            return not probe.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    except OSError:
        return False
