"""Two local clusters on one machine share no address, and a stopped cluster releases its addresses."""

from pathlib import Path

import pytest

from kvpilot_localcluster.addresses import Addresses, reserve
from kvpilot_localcluster.errors import LocalClusterError


def test_a_number_is_held_by_one_until_it_ends() -> None:
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


def test_two_agents_give_no_address_twice_and_an_agent_that_comes_again_keeps_its_block(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    a, b = (Addresses(folder) for folder in folders)
    given = [agent.take() for agent in (a, b) for _ in range(254)]
    assert len(set(given)) == len(given)
    block = (folders[0] / "block").read_text()
    del a
    assert Addresses(folders[0]).take().startswith(f"127.0.{block}.")
