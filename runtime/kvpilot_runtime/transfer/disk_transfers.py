"""Threads that move chunks between host memory and a file, and a watch over them.

A disk may fail, lie or never answer. A read lands in host memory only when its bytes have the checksum that they were
written with; one that does not end in time is given up, and then never lands there at all.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
import zlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpilot_runtime.transfer.disk_file import DiskFile
from kvpilot_runtime.transfer.disk_index import Held


@dataclass(eq=False)
class Move:
    """One chunk on its way.

    Attributes:
        job: that it belongs to. load: from the file, and not to it. held: its place. row: uint8 [bytes] of
            host memory.
        checksum: of what was moved; None where that failed. why: the error. given_up: nobody waits for it.
    """

    job: int
    load: bool
    held: Held
    row: npt.NDArray[np.uint8]
    checksum: int | None = None
    why: OSError | None = None
    given_up: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, file: DiskFile, spare: npt.NDArray[np.uint8]) -> None:
        """Move it; `spare` is a chunk's worth of memory of this thread's own."""
        try:
            if self.load:
                file.read(self.held.place, spare.data)
                if zlib.crc32(spare.data) != self.held.checksum:
                    raise OSError("the bytes are not those that were written")
                with self.lock:
                    if not self.given_up:
                        np.copyto(self.row, spare)
                self.checksum = self.held.checksum
            else:
                checksum = zlib.crc32(self.row.data)
                file.write(self.held.place, self.row.data)
                self.checksum = checksum
        except OSError as error:
            self.why = error


class DiskTransfers:
    """Moves between host memory and `file`, with so many `threads`; reads go first.

    Args:
        chunk: bytes of one. patience: seconds in which one move at least has to end, or all are given up.
    """

    def __init__(self, file: DiskFile, chunk: int, threads: int, patience: float) -> None:
        self._file, self._chunk, self._patience = file, chunk, patience
        self._asked: queue.PriorityQueue[tuple[int, int, Move | None]] = queue.PriorityQueue()
        self._over: queue.SimpleQueue[Move] = queue.SimpleQueue()
        self._number = 0
        self._waited: set[Move] = set()
        self._lost: set[Move] = set()
        self._progress = time.monotonic()
        self._threads = [threading.Thread(target=self._work, name="kvpilot-disk", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def stuck(self) -> bool:
        """Whether moves were given up that may yet end: nothing is asked of the disk until they have."""
        return bool(self._lost)

    @property
    def busy(self) -> bool:
        """Whether somebody waits for a move."""
        return bool(self._waited)

    def submit(self, move: Move) -> None:
        """Ask for one."""
        if not self._waited:
            self._progress = time.monotonic()
        self._waited.add(move)
        self._number += 1
        self._asked.put((0 if move.load else 1, self._number, move))

    def over(self, wait: float = 0.0) -> tuple[list[Move], list[Move]]:
        """Moves that ended since the last call, and those that are now given up; waits so many seconds for the first.

        What was given up ends too, and is then among the first for a second time.
        """
        ended: list[Move] = []
        while True:
            try:
                ended.append(self._over.get(timeout=wait) if wait and not ended else self._over.get_nowait())
            except queue.Empty:
                break
        if ended:
            self._progress = time.monotonic()
            self._waited.difference_update(ended)
            self._lost.difference_update(ended)
        lost: list[Move] = []
        if self._waited and time.monotonic() - self._progress > self._patience:
            lost = list(self._waited)
            for move in lost:
                with move.lock:
                    move.given_up = True
            self._waited.clear()
            self._lost.update(lost)
        return ended, lost

    def shutdown(self, seconds: float) -> None:
        """End the threads, and the file with them; a disk that does not answer is waited for so long."""
        for number in range(len(self._threads)):
            self._asked.put((-1, number, None))
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._file.close()

    def _work(self) -> None:
        spare = np.frombuffer(mmap.mmap(-1, self._chunk), np.uint8)  # begins at a page of memory
        while (move := self._asked.get()[2]) is not None:
            if not move.given_up:
                move.run(self._file, spare)
            self._over.put(move)
