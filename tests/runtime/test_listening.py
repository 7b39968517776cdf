"""An engine listens on the address families of its pod: IPv4, IPv6 or both."""

import errno
import socket
from typing import Any

import pytest
from vllm.entrypoints.launchers.launcher import create_server_socket

from kvpilot_runtime import listening, serve


def engines_host(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the value of --host in an engine's arguments."""
    monkeypatch.delenv(listening.HOST, raising=False)
    _, arguments = serve.parse(["--model=m", "--kv-cache-dtype=auto"])
    (host,) = (one.removeprefix("--host=") for one in arguments if one.startswith("--host="))
    return host


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_vllms_socket_accepts_ipv4_and_ipv6(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    with create_server_socket((engines_host(monkeypatch), 0), reuse_port=False) as server:
        server.listen()
        with socket.create_connection((address, server.getsockname()[1]), timeout=60):
            server.settimeout(60)
            server.accept()[0].close()


@pytest.mark.parametrize("which", ["no IPv6", "an IPv6 of its own"])
def test_without_dual_stack_sockets_the_engine_listens_on_ipv4(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Simulate a kernel without IPv6 or with net.ipv6.bindv6only, because a test cannot set these."""
    made = socket.socket

    class Other(made):  # type: ignore[misc,valid-type]
        def __init__(self, family: int = socket.AF_INET, *rest: Any) -> None:
            if family == socket.AF_INET6 and which == "no IPv6":
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *rest)
            if family == socket.AF_INET6:
                self.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)

    monkeypatch.setattr(socket, "socket", Other)
    assert engines_host(monkeypatch) == "0.0.0.0"  # noqa: S104 - what a pod listens at


def test_an_environment_variable_sets_the_address_to_listen_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(listening.HOST, "127.0.1.2")
    assert listening.host() == "127.0.1.2"
