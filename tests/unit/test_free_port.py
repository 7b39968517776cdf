"""No free port is handed out twice, even if the engine that got it listens only after a minute."""

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvpilot_localcluster import addresses
from kvpilot_localcluster.addresses import free_port


def test_a_free_port_is_outside_the_range_of_outgoing_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(20):
            port = free_port()
            with socket.create_connection(server.getsockname()) as client:
                assert port < client.getsockname()[1]


def test_a_used_or_already_returned_port_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    given, sample = free_port(), random.sample
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(addresses.random, "sample", lambda *asked: [taken, given, *sample(*asked)])
        assert free_port() not in (taken, given)


def test_two_processes_never_get_the_same_unused_port(monkeypatch: pytest.MonkeyPatch) -> None:
    given = free_port()
    code = (
        "import random, sys; from kvpilot_localcluster.addresses import free_port; sample = random.sample; "
        "random.sample = lambda *asked: [int(sys.argv[1]), *sample(*asked)]; print(free_port())"
    )
    theirs = subprocess.run([sys.executable, "-c", code, str(given)], capture_output=True, text=True, check=True)
    assert int(theirs.stdout) != given


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_any_number_of_ports_can_be_requested_in_turn() -> None:
    held = open_files()
    for _ in range(300):
        free_port()
    assert open_files() - held <= 64
