"""File without a name for pages that host memory evicts, one per engine, divided into places of equal size.

Without a name, no other engine can find the file, and its space is freed when its engine ends, even by a crash.
`refused` checks before an engine takes a GPU that the volume has room for the file.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path
from tempfile import TemporaryFile

from kvpilot_runtime.errors import PreflightError

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFile:
    """Unnamed file in a folder, read and written one place at a time.

    If the file system supports O_DIRECT, transfers bypass the page cache, which would count as the container's memory.
    Buffers must then be aligned to memory pages.

    Args:
        folder: the file's folder.
        place: bytes of a place, a multiple of 4,096.

    Raises:
        OSError: the folder does not exist, or cannot be written to.
    """

    def __init__(self, folder: str, place: int) -> None:
        self._place = place
        self._file = TemporaryFile(dir=folder, prefix=".kvpilot-", buffering=0)  # noqa: SIM115 - `close` closes it
        self.fd = self._file.fileno()
        try:
            with contextlib.suppress(OSError):
                _set_direct(self.fd, on=True)
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                try:
                    _write(self.fd, page, 0)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    _set_direct(self.fd, on=False)  # some file systems accept O_DIRECT, but no direct writes
                    _write(self.fd, page, 0)
        except OSError:
            self.close()
            raise

    def write(self, at: int, data: memoryview) -> None:
        """Fill place `at` with `data`, uint8 [place].

        Raises:
            OSError: the write failed or was incomplete; the place's content is then undefined.
        """
        _write(self.fd, data, at * self._place)

    def read(self, at: int, into: memoryview) -> None:
        """Fill `into`, uint8 [place], with the content of place `at`.

        Raises:
            OSError: the read failed, or the file ends before the place does.
        """
        found = os.preadv(self.fd, [into], at * self._place)
        if found != self._place:
            raise OSError(errno.EIO, f"{found} of {self._place} bytes are there")

    def close(self) -> None:
        """Close the file, which frees its space."""
        self._file.close()


def refused(option: str, folder: str, size: int) -> PreflightError | None:
    """Return an error that names `option` if a folder cannot hold a file of `size` bytes, else None."""
    if not Path(folder).is_dir():
        return PreflightError("BadArguments", f"{option} {folder!r}: there is no such folder here; check that its volume is mounted, or leave the option out")  # fmt: skip  # noqa: E501
    try:
        DiskFile(folder, mmap.PAGESIZE).close()
        found = os.statvfs(folder)
    except OSError as error:
        if error.errno in _FULL:
            return PreflightError("VolumeFull", f"{option} {folder!r}: nothing more can be written there ({error.strerror}); make room, or mount a larger volume")  # fmt: skip  # noqa: E501
        return PreflightError("VolumeNotWritable", f"{option} {folder!r}: a file cannot be written there ({error.strerror}); mount the volume for writing, and let the pod's user or group (fsGroup) write it")  # fmt: skip  # noqa: E501
    if size > (free := found.f_bavail * found.f_frsize):
        return PreflightError("VolumeFull", f"{option} {folder!r}: {size / 2**30:,.1f} GiB are to be kept there and {free / 2**30:,.1f} GiB are free; ask for less, make room, or mount a larger volume")  # fmt: skip  # noqa: E501
    return None


def _set_direct(opened: int, *, on: bool) -> None:
    flags = fcntl.fcntl(opened, fcntl.F_GETFL)
    fcntl.fcntl(opened, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


def _write(opened: int, data: memoryview | mmap.mmap, at: int) -> None:
    written = os.pwrite(opened, data, at)
    if written != len(data):
        raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes were written")
