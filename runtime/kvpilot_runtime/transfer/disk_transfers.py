"""Threads that move chunks between host memory and a file, with a time limit and checksums.

A disk may fail, corrupt data or never answer. A thread copies bytes that it has read to host memory only if their
checksum is that of the write. If a read does not end in time, its job stops waiting, and the bytes are not copied.
"""

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
    """Transfer of one chunk.

    Attributes:
        job: number of the transfer's job.
        load: True to read from the file, False to write to it.
        held: the chunk's place in the file.
        row: the chunk in host memory, uint8 [bytes].
        checksum: checksum of the bytes; None if the transfer has not succeeded.
        why: the error, or None.
        given_up: True if the job no longer waits for this transfer.
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
        """Read or write the chunk, by way of `spare`: this thread's buffer for one chunk, uint8 [bytes]."""
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
    """Transfers between host memory and `file`, by `threads` threads. Reads have priority.

    Args:
        chunk: bytes of a chunk.
        patience: time in seconds. If no transfer ends within it, all are given up.
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
        """True while transfers that were given up have not ended. The disk gets no new transfers until they do."""
        return bool(self._lost)

    @property
    def busy(self) -> bool:
        """True if a job waits for a transfer."""
        return bool(self._waited)

    def submit(self, move: Move) -> None:
        """Queue a transfer; a thread runs it later."""
        if not self._waited:
            self._progress = time.monotonic()
        self._waited.add(move)
        self._number += 1
        self._asked.put((0 if move.load else 1, self._number, move))

    def over(self, wait: float = 0.0) -> tuple[list[Move], list[Move]]:
        """Return the transfers that ended since the last call, and the transfers that are given up now.

        A transfer that was given up is returned again once it ends. `wait` is how many seconds to wait for a first
        transfer to end.
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
        """End the threads, then close the file. If the disk blocks a thread for over `seconds`, leave the file open."""
        for number in range(len(self._threads)):
            self._asked.put((-1, number, None))
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._file.close()

    def _work(self) -> None:
        spare = np.frombuffer(mmap.mmap(-1, self._chunk), np.uint8)  # O_DIRECT needs page alignment
        while (move := self._asked.get()[2]) is not None:
            if not move.given_up:
                move.run(self._file, spare)
            self._over.put(move)
