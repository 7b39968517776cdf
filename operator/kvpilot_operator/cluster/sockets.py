"""Connections on which nothing is sent late: the kernel forgets what the server does not acknowledge soon.

Otherwise a request that was sent into a broken network is repeated by the kernel for minutes, even after its connection
was closed or its process killed, and arrives when the network is back and another replica leads.
"""

from __future__ import annotations

import socket
from typing import Any

import aiohttp
from kubernetes_asyncio.client import ApiClient

# The shortest time between the last moment that a write may start and the moment that it must be over.
UNACKNOWLEDGED_MILLISECONDS = 4000


def give_up_early(api: ApiClient) -> None:
    """Have every connection of this client, all of them still to be made, dropped when it hears nothing for 4 s."""
    connector: aiohttp.TCPConnector = api.rest_client.pool_manager.connector
    # The client makes its connector itself, and aiohttp takes a maker of sockets at no later time.
    connector._socket_factory = _socket


def _socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family=family, type=kind, proto=protocol)
    # Linux alone has it.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MILLISECONDS)
    return made
