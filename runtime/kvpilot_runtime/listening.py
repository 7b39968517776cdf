"""Choose the address that engines listen on."""

import os
import socket

HOST = "KVPILOT_SERVE_HOST"
"""Environment variable with the address to listen on. Set it if several pods share a machine's network."""


def host() -> str:
    """Return the address in the variable `HOST`. If it is unset, return `::` if `::` also accepts IPv4, else 0.0.0.0.

    Prefer `::`, because 0.0.0.0 cannot be reached in clusters whose pods have only IPv6 addresses.
    """
    return os.environ.get(HOST) or ("::" if _takes_both_families() else "0.0.0.0")  # noqa: S104 - pods serve all


def _takes_both_families() -> bool:
    """Return True if a socket on :: also accepts IPv4. It does not if IPv6 is off or net.ipv6.bindv6only is set."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
            return not probe.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    except OSError:
        return False
