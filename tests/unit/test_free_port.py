"""Ports that are handed out before somebody listens on them: an engine takes a minute to."""

from __future__ import annotations

import socket

import pytest

from kvpilot_localcluster import controlplane
from kvpilot_localcluster.controlplane import free_port


def test_a_port_is_none_that_an_outgoing_connection_may_be_given_meanwhile() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(20):
            port = free_port()
            with socket.create_connection(server.getsockname()) as client:
                assert port < client.getsockname()[1]


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(controlplane.random, "sample", lambda *_: [server.getsockname()[1], free])
        assert free_port() == free
