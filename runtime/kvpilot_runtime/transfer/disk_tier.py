"""Secondary offloading tier for vLLM 0.32: a file for pages that host memory evicts.

A chunk is vLLM's unit of offloading, one or more blocks. vLLM's own tier `fs` names files without factors or dtype,
does not check what it reads, and never deletes files. Our file has a fixed size, no other engine can find it, and every
chunk has a checksum. If a checksum is wrong, the chunk's tokens are computed again.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.transfer.disk_file import DiskFile
from kvpilot_runtime.transfer.disk_index import DiskIndex
from kvpilot_runtime.transfer.disk_transfers import DiskTransfers, Move

logger = init_logger("vllm.kvpilot")

THREADS = 16
PATIENCE = 30.0
"""Time in seconds within which the disk must finish at least one transfer."""

PINNED = 4
"""At most one of this many chunks of host memory may wait for the disk. Further stores are dropped.

Host memory cannot reuse a chunk while it waits for the disk.
"""


@dataclass
class _Job:
    """A vLLM job that stores or loads chunks. `left` transfers are unfinished; `good` has the keys that succeeded."""

    keys: list[Any]
    left: int
    load: bool
    good: list[Any] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)


class DiskTier(SecondaryTierManager):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """Secondary tier: copies of host memory's chunks, in one file of one engine.

    Args:
        offloading_spec, tier_type, backpressure_detector: vLLM's arguments.
        primary_kv_view: host memory, [chunks, bytes].
        path: folder of the file.
        size_bytes: maximum size of the file.

    Raises:
        UnsupportedModelError: the file has no room for even one chunk.
        OSError: the folder cannot be written to.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, path: str, size_bytes: int,
        backpressure_detector: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        self._chunks, chunk = self._rows.shape
        if size_bytes < chunk:
            raise UnsupportedModelError(f"{size_bytes} bytes of disk have no room for a block of {chunk} bytes; give "
                                        "offloaded pages more of it, or leave the disk out")  # fmt: skip
        self._index = DiskIndex(size_bytes // chunk)
        self._transfers = DiskTransfers(DiskFile(path, chunk), chunk, THREADS, PATIENCE)
        self._jobs: dict[int, _Job] = {}
        self._finished: list[JobResult] = []
        self._storing = 0
        self._asked_for: dict[str, set[Any]] = {}
        self._failing = False
        logger.info("Offloaded pages go on to a file in %s, of %d blocks of %d bytes at most", path,
                    self._index.places, chunk)  # fmt: skip

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Return vLLM's default: all requests are stored in the same way."""
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Look a chunk up. A request gets a hit for each chunk only once, and for at most as many as host memory has.

        Otherwise requests whose prefixes do not fit together in host memory would evict each other's chunks forever.
        """
        self._collect()
        given = self._asked_for.setdefault(req_context.req_id, set())
        if self._transfers.stuck or key in given or len(given) >= self._chunks or not self._index.ready(key):
            return LookupResult.MISS
        given.add(key)
        return LookupResult.HIT

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        """Mark these chunks as used. Of them, the last one will be evicted first, because prefixes need the first."""
        for key in reversed(list(keys)):
            self._index.ready(key)

    def on_request_finished(self, req_context: Any) -> None:
        """Forget the chunks that `lookup` has reported to this request."""
        self._asked_for.pop(req_context.req_id, None)

    def submit_store(self, job_metadata: Any) -> None:
        """Start to write chunks to the file, except those that it has. Drop chunks if too many wait for the disk."""
        job = self._start(job_metadata, load=False)
        for key, at in zip(job.keys, job_metadata.chunk_ids, strict=True):
            if key in self._index:
                job.good.append(key)
            elif not self._transfers.stuck and self._storing * PINNED < self._chunks:
                self._move(job_metadata.job_id, self._index.to_store(key), at, load=False)
        self._end_if_over(job_metadata.job_id)

    def submit_load(self, job_metadata: Any) -> None:
        """Start to read a job's chunks from the file into host memory."""
        job = self._start(job_metadata, load=True)
        for key, at in zip(job.keys, job_metadata.chunk_ids, strict=True):
            self._move(job_metadata.job_id, self._index.to_load(key), at, load=True)
        self._end_if_over(job_metadata.job_id)

    def get_finished_jobs(self) -> list[JobResult]:
        """Return the jobs that ended since the last call."""
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def drain_jobs(self) -> None:
        """Wait for all jobs, and forget all chunks.

        vLLM calls this when it resets host memory, for example after a change of weights, which outdates all chunks.
        """
        while self._transfers.busy:
            self._collect(wait=0.1)
        self._index.clear()

    def shutdown(self) -> None:
        """End the transfers, and free the file's space."""
        self._transfers.shutdown(5.0)

    def _start(self, asked: Any, *, load: bool) -> _Job:
        job = self._jobs[asked.job_id] = _Job(list(asked.keys), 0, load)
        return job

    def _move(self, number: int, held: Any, at: int, *, load: bool) -> None:
        if held is None:
            return
        self._jobs[number].left += 1
        self._storing += not load
        self._transfers.submit(Move(number, load, held, self._rows[int(at)]))

    def _collect(self, wait: float = 0.0) -> None:
        """Process the transfers that ended or timed out since the last call; wait up to `wait` seconds for one."""
        was_stuck = self._transfers.stuck
        ended, lost = self._transfers.over(wait)
        for move in ended:
            (self._index.loaded if move.load else self._index.stored)(
                move.held, **({"good": move.checksum is not None} if move.load else {"checksum": move.checksum})
            )
            if not move.given_up:
                self._take(move)
        for move in lost:
            self._index.drop(move.held)
            self._take(move)
        if lost:
            logger.error("The disk of offloaded pages has not answered for %.0f s: it gets no requests until it does, "
                         "and answers are computed without it", PATIENCE)  # fmt: skip
        elif was_stuck and not self._transfers.stuck:
            logger.warning("The disk of offloaded pages answers again")

    def _take(self, move: Move) -> None:
        """Record in its job that one transfer has ended."""
        job = self._jobs[move.job]
        job.left -= 1
        self._storing -= not move.load
        if move.checksum is not None and not move.given_up:
            job.good.append(move.held.key)
        if move.why is not None and not self._failing:
            logger.error("A page could not be %s the disk of offloaded pages (%s): it is dropped, as all are until one "
                         "can be again", "read from" if move.load else "written to", move.why)  # fmt: skip
        self._failing = move.why is not None
        self._end_if_over(move.job)

    def _end_if_over(self, number: int) -> None:
        job = self._jobs[number]
        if job.left:
            return
        del self._jobs[number]
        whole = len(job.good) == len(job.keys)
        good = tuple(job.good) if job.load and job.good and not whole else None
        size = len(job.good) * self.block_size_bytes
        self._finished.append(JobResult(number, whole, good, time.monotonic() - job.began, size))
