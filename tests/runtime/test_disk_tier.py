"""The disk tier as vLLM's tiering manager calls it, with host memory for a few chunks and a file of fewer or more."""

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.transfer.disk_tier import DiskTier

CHUNK, CHUNKS = 2 * mmap.PAGESIZE, 16
HANGS = 60
"""Seconds after which a job, which takes milliseconds, counts as lost."""


class World:
    """Tier with the host memory above it and the calls of vLLM's manager."""

    def __init__(self, folder: Path, places: int = 32) -> None:
        rng = np.random.default_rng(1)
        self.memory = np.frombuffer(mmap.mmap(-1, CHUNK * CHUNKS), np.int8).reshape(CHUNKS, CHUNK)
        self.memory[:] = rng.integers(-128, 128, self.memory.shape, np.int8)
        self.tier = DiskTier(None, memoryview(self.memory), "disk", str(folder), places * CHUNK)
        self.jobs = 0

    def job(self, keys: list[bytes], chunks: list[int], *, load: bool = False, wait: bool = True) -> Any:
        """Move these keys from or to these chunks, and return the result."""
        self.jobs += 1
        asked = TransferJob(self.jobs, keys, np.array(chunks), load, ReqContext("r"))
        (self.tier.submit_load if load else self.tier.submit_store)(asked)
        return self.result() if wait else None

    def result(self) -> Any:
        """Return the result of the next job that ends."""
        until = time.monotonic() + HANGS
        while time.monotonic() < until:
            if found := self.tier.get_finished_jobs():
                (one,) = found
                return one
            time.sleep(0.001)
        raise TimeoutError

    def has(self, key: bytes, request: str = "other") -> bool:
        found: bool = self.tier.lookup(key, ReqContext(request)) is LookupResult.HIT
        return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.tier.shutdown()


def test_chunks_come_back_to_other_places_as_they_left(world: World) -> None:
    left = world.memory.copy()
    assert world.job([b"a", b"b", b"c"], [3, 0, 7]).success
    world.memory[:] = 0
    assert world.job([b"c", b"a"], [1, 9], load=True).success
    assert (world.memory[1] == left[7]).all()
    assert (world.memory[9] == left[3]).all()
    assert not world.memory[[i for i in range(CHUNKS) if i not in (1, 9)]].any()


def test_of_a_load_that_fails_in_part_the_rest_is_kept_and_what_failed_is_not_found_again(world: World) -> None:
    left = world.memory.copy()
    world.job([b"a", b"b", b"c"], [0, 1, 2])
    opened = world.tier._transfers._file
    opened.write(1, memoryview(mmap.mmap(-1, CHUNK)))  # b's place: overwritten with zeros
    found = world.job([b"a", b"b", b"c"], [4, 5, 6], load=True)
    assert not found.success
    assert set(found.successful_keys) == {b"a", b"c"}
    assert (world.memory[[4, 5, 6]] == left[[0, 5, 2]]).all()
    assert [world.has(key) for key in (b"a", b"b", b"c")] == [True, False, True]


def test_the_least_recently_used_make_room_and_the_file_stays_as_small_as_it_was_asked_to(tmp_path: Path) -> None:
    world = World(tmp_path, places=4)
    for i, key in enumerate((b"a", b"b", b"c", b"d")):
        world.job([key], [i])
    world.tier.touch([b"a", b"b"], ReqContext("r"))
    assert world.job([b"e", b"f"], [4, 5]).success
    assert [world.has(key) for key in (b"a", b"b", b"c", b"d", b"e", b"f")] == [True, True, False, False, True, True]
    assert Path(f"/proc/self/fd/{world.tier._transfers._file.fd}").stat().st_size == 4 * CHUNK
    world.tier.shutdown()


def test_a_request_is_given_a_chunk_once_and_no_more_than_host_memory_has_room_for(world: World) -> None:
    keys = [bytes([i]) for i in range(20)]
    for key in keys:
        world.job([key], [0])
    assert [world.has(key, "one") for key in keys] == [True] * CHUNKS + [False] * 4
    assert not world.has(keys[0], "one")
    assert world.has(keys[0], "two")
    world.tier.on_request_finished(ReqContext("one"))
    assert world.has(keys[0], "one")


def test_a_reset_forgets_what_was_stored_also_what_was_under_way(world: World) -> None:
    world.job([b"a"], [0])
    world.job([b"b"], [1], wait=False)
    world.tier.drain_jobs()
    assert world.result().success
    assert not world.has(b"a")
    assert not world.has(b"b")
    assert world.job([b"a"], [2]).success
    assert world.has(b"a")


def held(world: World) -> Callable[[], None]:
    """Stop the disk until the returned function is called."""
    answers, file = threading.Event(), world.tier._transfers._file
    for name in ("read", "write"):
        does = getattr(file, name)
        vars(file)[name] = lambda *given, does=does: (answers.wait(HANGS), does(*given))
    return answers.set


def test_no_more_than_a_quarter_of_host_memory_waits_for_a_slow_disk(world: World) -> None:
    release = held(world)
    keys = [bytes([i]) for i in range(10)]
    world.job(keys, list(range(10)), wait=False)
    world.job([b"x", b"y"], [11, 12], wait=False)
    beyond = world.tier.get_finished_jobs()
    assert [one.success for one in beyond] == [False]  # dropped transfers are counted
    release()
    assert not world.result().success
    assert [world.has(key) for key in (*keys, b"x")] == [True] * 4 + [False] * 7


def test_a_disk_that_does_not_answer_is_left_alone_until_it_does(world: World) -> None:
    transfers = world.tier._transfers
    patience = transfers._patience
    world.job([b"a"], [0])
    left = world.memory.copy()
    release = held(world)
    transfers._patience = 0.2
    assert not world.job([b"a"], [5], load=True).success
    transfers._patience = patience  # a slow machine may take longer, although the disk answers
    assert not world.has(b"a")
    assert not world.job([b"b"], [1]).success  # fails at once
    release()
    until = time.monotonic() + HANGS
    while transfers.stuck and time.monotonic() < until:
        assert world.tier.get_finished_jobs() == []
        time.sleep(0.001)
    assert (world.memory == left).all()
    assert world.job([b"b"], [1]).success
    assert world.has(b"b")


def test_a_disk_without_room_for_one_block_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"no room for a block of {CHUNK} bytes"):
        DiskTier(None, memoryview(np.zeros((CHUNKS, CHUNK), np.int8)), "disk", str(tmp_path), CHUNK - 1)
