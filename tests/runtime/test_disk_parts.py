"""Parts of the disk tier: the index of places in the file, the file itself, and the threads that use it."""

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_runtime.transfer.disk_file import DiskFile
from kvpilot_runtime.transfer.disk_index import DiskIndex, Held
from kvpilot_runtime.transfer.disk_transfers import DiskTransfers, Move
from support.small_volumes import small_volume

CHUNK = mmap.PAGESIZE
HANGS = 60
"""Seconds after which a transfer, which takes milliseconds, counts as lost."""

KEYS = st.binary(min_size=1, max_size=1)
STEPS = st.lists(st.tuples(st.sampled_from(["store", "load", "end", "fail", "touch", "clear"]), KEYS), max_size=80)


@given(st.integers(1, 5), STEPS)
def test_a_place_has_one_holder_and_none_that_a_transfer_uses_is_given_away(
    places: int, steps: list[tuple[str, bytes]]
) -> None:
    index = DiskIndex(places)
    under_way: list[tuple[Held, bool]] = []
    checksums: dict[bytes, int] = {}
    for number, (step, key) in enumerate(steps):
        if step == "store" and key not in index:
            used = {held.place for held, _ in under_way}
            held = index.to_store(key)
            assert (held is None) == (len(used) == places)
            if held is not None:
                assert held.place not in used
                assert 0 <= held.place < places
                under_way.append((held, False))
        elif step == "load":
            ready = index.ready(key)
            held = index.to_load(key)
            assert (held is not None) == ready
            if held is not None:
                assert held.checksum == checksums[key]
                under_way.append((held, True))
        elif step in ("end", "fail") and under_way:
            held, load = under_way.pop(0)
            if load:
                index.loaded(held, good=step == "end")
            else:
                index.stored(held, number if step == "end" else None)
                checksums[held.key] = number
            assert step == "end" or held.gone
        elif step == "clear":
            index.clear()
            assert len(index) == 0
        index.ready(key) if step == "touch" else None
        assert len(index) <= places


def test_what_was_used_least_recently_makes_room() -> None:
    index = DiskIndex(3)
    for key in (b"a", b"b", b"c"):
        held = index.to_store(key)
        assert held is not None
        index.stored(held, 1)
    assert index.ready(b"a")
    assert index.to_store(b"d") is not None
    assert [index.ready(key) for key in (b"a", b"b", b"c")] == [True, False, True]


def page(seed: int) -> mmap.mmap:
    """Return a memory page of random bytes."""
    found = mmap.mmap(-1, CHUNK)
    found[:] = np.random.default_rng(seed).bytes(CHUNK)
    return found


def test_a_file_gives_back_what_it_was_given_and_has_no_name(tmp_path: Path) -> None:
    file, into = DiskFile(str(tmp_path), CHUNK), page(9)
    for at in (3, 0, 7):
        file.write(at, memoryview(page(at)))
    assert list(tmp_path.iterdir()) == []
    for at in (0, 3, 7):
        file.read(at, memoryview(into))
        assert into[:] == page(at)[:]
    assert os.fstat(file.fd).st_mode & 0o077 == 0
    file.close()


def test_a_file_system_without_unnamed_files_serves_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = os.open

    def named_alone(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return stock(path, flags, mode)

    monkeypatch.setattr(os, "open", named_alone)
    file, into = DiskFile(str(tmp_path), CHUNK), page(9)
    file.write(1, memoryview(page(1)))
    file.read(1, memoryview(into))
    assert into[:] == page(1)[:]
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    file = DiskFile(str(tmp_path), CHUNK)
    file.write(0, memoryview(page(0)))
    os.ftruncate(file.fd, CHUNK // 2)
    with pytest.raises(OSError, match="bytes are there"):
        file.read(0, memoryview(page(9)))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 64 KiB."""
    where = tmp_path / "small"
    where.mkdir()
    with small_volume(where, "64k"):
        yield where


def test_a_volume_that_fills_up_is_an_error_and_what_was_written_stays(small: Path) -> None:
    file, into = DiskFile(str(small), CHUNK), page(9)
    with pytest.raises(OSError, match=r"No space|were written") as caught:
        for at in range(17):
            file.write(at, memoryview(page(at)))
    assert caught.value.errno == errno.ENOSPC
    file.read(5, memoryview(into))
    assert into[:] == page(5)[:]


def stored(transfers: DiskTransfers, held: Held, row: mmap.mmap) -> None:
    """Write a place and wait for it."""
    transfers.submit(Move(1, False, held, np.frombuffer(row, np.uint8)))
    (move,), lost = transfers.over(HANGS)
    assert lost == []
    held.checksum = move.checksum


def test_bytes_that_are_not_those_that_were_written_do_not_land_in_host_memory(tmp_path: Path) -> None:
    file = DiskFile(str(tmp_path), CHUNK)
    transfers = DiskTransfers(file, CHUNK, 2, HANGS)
    held = Held(b"k", 2)
    stored(transfers, held, page(1))
    into = page(9)
    for _ in range(2):
        transfers.submit(Move(2, True, held, np.frombuffer(into, np.uint8)))
        (move,), _ = transfers.over(HANGS)
        if move.checksum is not None:
            assert into[:] == page(1)[:]
            into[:] = page(9)[:]
            changed = page(1)
            changed[17] ^= 1
            file.write(2, memoryview(changed))
    assert move.checksum is None
    assert "not those that were written" in str(move.why)
    assert into[:] == page(9)[:]
    transfers.shutdown(HANGS)


def test_a_disk_that_does_not_answer_is_given_up_and_what_it_answers_late_lands_nowhere(tmp_path: Path) -> None:
    file = DiskFile(str(tmp_path), CHUNK)
    transfers = DiskTransfers(file, CHUNK, 1, HANGS)
    held = Held(b"k", 0)
    stored(transfers, held, page(1))
    transfers._patience = 0.2  # set only now, so that the first store has enough time
    answers, read = threading.Event(), file.read
    vars(file)["read"] = lambda *given: (answers.wait(HANGS), read(*given))
    into = page(9)
    moves = [Move(number, True, held, np.frombuffer(into, np.uint8)) for number in (2, 3)]
    for move in moves:
        transfers.submit(move)
    until, lost = time.monotonic() + HANGS, list[Move]()
    while not lost and time.monotonic() < until:
        ended, lost = transfers.over(0.05)
        assert ended == []
    assert set(lost) == set(moves)  # one was sent to the disk, and one still waited
    assert transfers.stuck
    assert not transfers.busy
    answers.set()
    late = list[Move]()
    while len(late) < 2 and time.monotonic() < until:
        late += transfers.over(0.05)[0]
    assert set(late) == set(moves)
    assert not transfers.stuck
    assert into[:] == page(9)[:]
    transfers.shutdown(HANGS)
