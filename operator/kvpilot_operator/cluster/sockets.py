"""Connections on which nothing is sent late: the kernel forgets what the server does not acknowledge soon.

Otherwise a request that was sent into a broken network is repeated by the kernel for minutes, even after its connection
was closed or its process killed, and arrives when the network is back and another replica leads.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.rest import RESTClientObject

# The shortest time between the last moment that a write may start and the moment that it must be over.
UNACKNOWLEDGED_MILLISECONDS = 4000


def connector(tls: ssl.SSLContext) -> aiohttp.TCPConnector:
    """Makes connections that give up early; any number, for watches hold one each and a write must not wait for one."""
    return aiohttp.TCPConnector(limit=0, ssl=tls, socket_factory=_socket)


class _Rest(RESTClientObject):  # type: ignore[misc]  # the official client has no types for us
    def _create_connector(self) -> aiohttp.TCPConnector:
        return connector(self.ssl_context)


def give_up_early(api: ApiClient) -> None:
    """Have every connection of this client, all of them still to be made, dropped when it hears nothing for 4 s."""
    # Neither a proxy nor credentials for it, or for anybody else, from the environment.
    api.configuration.client_session_kwargs = {"trust_env": False}
    api.rest_client = _Rest(api.configuration)


def _socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family=family, type=kind, proto=protocol)
    # Linux alone has it.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MILLISECONDS)
    return made
