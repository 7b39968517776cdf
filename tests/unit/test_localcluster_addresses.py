"""Two local clusters on one machine share no address, and a stopped cluster releases its addresses."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvpilot_localcluster.addresses import Addresses, reserve
from kvpilot_localcluster.errors import LocalClusterError


def test_an_address_has_one_owner_until_its_process_ends() -> None:
    name = "kvpilot-test-of-addresses"
    first, lock = reserve(name, [1, 2])
    second, other = reserve(name, [1, 2])
    with other:
        assert (first, second) == (1, 2)
        with pytest.raises(LocalClusterError, match="end some local clusters"):
            reserve(name, [1, 2])
        lock.close()
        again, lock = reserve(name, [1, 2])
        assert again == 1
        lock.close()


def test_two_agents_use_different_addresses_and_a_restarted_agent_keeps_its_block(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    a, b = (Addresses(folder) for folder in folders)
    given = [agent.take() for agent in (a, b) for _ in range(254)]
    assert len(set(given)) == len(given)
    block = (folders[0] / "block").read_text()
    del a
    assert Addresses(folders[0]).take().startswith(f"127.0.{block}.")


@pytest.mark.parametrize("user", ["me", "nobody"])
def test_any_user_may_listen_at_the_port_that_stands_for_port_80(user: str) -> None:
    code = (
        "import os, socket, sys; from kvpilot_localcluster.addresses import service_port\n"
        "if sys.argv[1] == 'nobody' and os.geteuid() == 0: os.setuid(65534)\n"
        "port = service_port(80); socket.socket().bind(('127.126.255.253', port)); print(port, os.geteuid())"
    )
    told = subprocess.run([sys.executable, "-c", code, user], check=True, capture_output=True, text=True, timeout=120)
    port, owner = map(int, told.stdout.split())
    lowest = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    assert port == (80 if owner == 0 or lowest <= 80 else 20080)
