"""Checks before the demo changes anything. They use only the standard library, because no package is installed yet."""

import os
import socket
from collections.abc import Mapping

from kvpilot_localcluster import build, debian
from kvpilot_localcluster.addresses import UNUSED_SERVICE, service_port
from kvpilot_localcluster.cache import cache_folder
from kvpilot_localcluster.causes import PROXIES, no_room, without_password
from kvpilot_localcluster.errors import LocalClusterError

INSTALL_GB = 5.0
"""Free disk space in GB that the first run needs for packages and wheels. 3.7 GB of it remain in use."""
BUILD_GB = 3.0
"""Free disk space in GB that the build of the control plane needs. 0.3 GB of it remain in use."""
# Loopback address that no pod uses, to try whether a port is free.
_POD = "127.0.255.254"


def faults(*, local: bool, installed: bool, variables: Mapping[str, str] | None = None) -> list[str]:
    """Return a message for each problem that keeps the demo from running, with its remedy.

    Args:
        local: True if the demo runs on its own cluster.
        installed: True if the packages are installed.
        variables: environment variables; None for those of this process.
    """
    given = os.environ if variables is None else variables
    needed = 0.0 if installed else INSTALL_GB
    found = []
    if local:
        found += [taken(_POD, 8000), taken(UNUSED_SERVICE, service_port(80))]
        try:
            if build.find(newer=False) is None:
                needed += BUILD_GB
                debian.check_tools()
        except LocalClusterError as error:
            found.append(str(error))
    if needed:
        found += [no_room(cache_folder(), needed), _silent_proxy(given)]
    return [one for one in found if one]


def taken(address: str, port: int) -> str:
    """Return a message if a program listens at this port on all addresses, else the empty string.

    Pods and Services could then not use the port.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
        except PermissionError:
            return ""
        except OSError:
            return f"port {port} is taken on all addresses: end the program that listens there (ss -ltnp shows it)"
    return ""


def _silent_proxy(variables: Mapping[str, str]) -> str:
    name = next((one for one in PROXIES if variables.get(one)), None)
    if name is None:
        return ""
    address = variables[name].split("//")[-1].split("@")[-1].rstrip("/")
    host, _, port = address.partition(":")
    try:
        with socket.create_connection((host, int(port or 80)), timeout=10):
            return ""
    except (OSError, ValueError) as error:
        return f"{name}={without_password(variables[name])} does not answer ({error}): correct it, or unset it"
