"""Two local clusters on one machine share no address, and a stopped cluster releases its addresses."""

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
