"""`kvpilot-prefetch`: download models from the hub to a volume claim before engines start.

It needs neither a GPU nor vLLM. It does not fetch existing files again, so an interrupted download resumes. While it
runs, its /metrics has the bytes on the claim and the total. On failure, the last line on stderr is JSON like that of
kvpilot-serve, with a reason: ModelNotFound, VolumeFull, VolumeNotWritable or HubUnreachable.
"""

import argparse
import errno
import fnmatch
import json
import os
import shutil
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvpilot_formats.installed import add_version, lacks
from kvpilot_formats.untrusted import lines
from kvpilot_runtime import listening
from kvpilot_runtime.errors import PreflightError, tell
from kvpilot_runtime.preflight import hub

# Exit status after SIGTERM, as shells report it: 128 + 15.
_TERMINATED = 143
_AGAIN = 1
_REFUSED = 78
_INDEX = "model.safetensors.index.json"
# Weights in vLLM's order of preference: it loads the first format that a model has.
_LOADED = ("*.safetensors", "*.bin", "*.pt")
_WEIGHTS = frozenset([
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".hdf5", ".msgpack", ".onnx", ".onnx_data",
    ".ot", ".tflite", ".npz", ".nemo", ".mlmodel", ".mlpackage", ".keras", ".pb", ".tar", ".gz", ".zip", ".parquet",
])  # fmt: skip
# A partial file that nobody writes to belongs to a killed download. huggingface_hub 2 never reuses it.
_ABANDONED_SECONDS = 600
_AT_ONCE = 8
_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Part:
    """Model or adapter to download from the hub. `files` are (name, bytes, name of the content in the hub cache)."""

    name: str
    revision: str | None
    files: tuple[tuple[str, int, str], ...]

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(size for _, size, _ in self.files)

    def there(self, cache: Path) -> int:
        """Return how many bytes of the files are in the cache, including partial files."""
        contents = _contents(cache, self.name)
        found: dict[str, int] = {}
        for path in contents.iterdir() if contents.is_dir() else ():
            content = path.name.partition(".")[0]
            found[content] = max(found.get(content, 0), _written(path))
        # The cache stores files of equal content once, so count each content once.
        return sum(min(size, found.get(content, 0)) for _, size, content in self.files)


def chosen(files: Iterable[str], index: Mapping[str, object] | None = None) -> set[str]:
    """Return the files of a model that an engine reads: weights in one format, and all files that are not weights.

    `index` is the content of model.safetensors.index.json, which lists the weights; None if the model has none.
    """
    names = set(files)
    plain = {name for name in names if PurePosixPath(name).suffix.lower() not in _WEIGHTS}
    named = index.get("weight_map") if index is not None else None
    if isinstance(named, Mapping) and named:
        return plain | (names & {str(name) for name in named.values()})
    loaded = (fnmatch.filter(names, pattern) for pattern in _LOADED)
    return plain | set(next((found for found in loaded if found), []))


def plan(name: str, revision: str | None) -> Part:
    """Return the files of a model to download, as the hub lists them.

    Raises:
        PreflightError: ModelNotFound.
        Exception: one of `_client_errors`, if the hub cannot be reached or its answer cannot be used.
    """
    from huggingface_hub import HfApi, hf_hub_download

    with hub.refusals(name, revision):
        siblings = HfApi().model_info(name, revision=revision, files_metadata=True).siblings or []
        sizes = {one.rfilename: one.size or 0 for one in siblings}
        contents = {one.rfilename: (one.lfs.sha256 if one.lfs else one.blob_id) or "" for one in siblings}
        index = None
        if _INDEX in sizes:
            index = json.loads(Path(hf_hub_download(name, _INDEX, revision=revision)).read_bytes())
    files = sorted(chosen(sizes, index if isinstance(index, dict) else None))
    return Part(name, revision, tuple((file, sizes[file], contents[file]) for file in files))


def fetch(part: Part) -> None:
    """Download missing files one by one, not as a snapshot of the repository.

    An engine that cannot reach the hub would reject a snapshot that has only some of the repository's files.

    Raises:
        PreflightError: ModelNotFound.
        Exception: one of `_client_errors`, if the hub or the file system fails.
    """
    from huggingface_hub import hf_hub_download

    with hub.refusals(part.name, part.revision), ThreadPoolExecutor(_AT_ONCE) as pool:
        begun = [pool.submit(hf_hub_download, part.name, file, revision=part.revision) for file, _, _ in part.files]
        try:
            for one in begun:
                one.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def tidy(cache: Path, name: str, now: float) -> None:
    """Remove partial files that nobody has written to for ten minutes."""
    for path in _contents(cache, name).glob("*.*.incomplete"):
        if now - path.stat().st_mtime > _ABANDONED_SECONDS:
            path.unlink(missing_ok=True)


def check_room(cache: Path, parts: Sequence[Part]) -> None:
    """Refuse downloads that do not fit on the volume.

    Raises:
        PreflightError: VolumeFull.
    """
    missing = sum(part.size - part.there(cache) for part in parts)
    free = shutil.disk_usage(cache).free
    if missing > free:
        raise _full(f"{missing / 1e9:.1f} GB are missing, and {free / 1e9:.1f} GB are free")


def run(wanted: Sequence[tuple[str, str | None]], cache: Path, port: int) -> None:
    """Download `wanted` models, as (name, revision), into the cache, and serve metrics at `port`.

    Raises:
        PreflightError: a model cannot be downloaded.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for name, _ in wanted:
            tidy(cache, name, time.time())
        parts = [plan(name, revision) for name, revision in wanted]
        check_room(cache, parts)
        _tell(parts, cache, port)
        for part in parts:
            fetch(part)
    except _client_errors() as error:
        raise _explained(error) from error


def _client_errors() -> tuple[type[Exception], ...]:
    """Return the error classes of the hub's client: OSError, and the base error of its HTTP library."""
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))


def _tell(parts: Sequence[Part], cache: Path, port: int) -> None:
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    registry = CollectorRegistry()
    there = Gauge("kvpilot_prefetch_bytes", "Bytes of these files that are on the claim.", registry=registry)
    there.set_function(lambda: sum(part.there(cache) for part in parts))
    total = Gauge("kvpilot_prefetch_total_bytes", "Bytes of all files to download.", registry=registry)
    total.set(sum(part.size for part in parts))
    start_http_server(port, listening.host(), registry)


def _explained(error: Exception) -> PreflightError:
    """Turn an error of the file system or of the hub's client into a refusal with a remedy."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL:
        return _full(str(error))
    if number in _READ_ONLY:
        return PreflightError("VolumeNotWritable", f"{error}: the claim's files must be writable for the pod's user or group; set fsGroup in spec.engine.podTemplate.spec.securityContext, or the owner where the volume is made")  # fmt: skip  # noqa: E501
    words = lines(f"{type(error).__name__}: {error}").partition("\n")[0][:300]
    return PreflightError("HubUnreachable", f"{words}; it is tried again. Let pods reach the hub, or name a mirror or proxy in spec.engine.env (HF_ENDPOINT, HTTPS_PROXY)")  # fmt: skip  # noqa: E501


def _full(why: str) -> PreflightError:
    return PreflightError("VolumeFull", f"{why}; raise spec.cache.weights.size, or remove what is not needed from the claim")  # fmt: skip  # noqa: E501


def _contents(cache: Path, name: str) -> Path:
    """Return the folder of a model's blobs in the hub cache: files that are named by the hash of their content."""
    return cache / f"models--{name.replace('/', '--')}" / "blobs"


def _written(path: Path) -> int:
    """Return how many bytes of a file are on disk. Count blocks, because a sparse file has its final size at once."""
    try:
        about = path.stat()
    except FileNotFoundError:  # another thread has renamed the file since it was listed
        return 0
    return min(about.st_size, about.st_blocks * 512)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvpilot-prefetch`. Return 0 on success, 1 if a retry may help, 78 if a retry cannot help."""
    parser = argparse.ArgumentParser(prog="kvpilot-prefetch", allow_abbrev=False, description=__doc__)
    add_version(parser)
    parser.add_argument("--model", required=True, metavar="ORG/MODEL", help="model on the hub")
    parser.add_argument("--revision", help="branch, tag or commit of the model")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="ORG/ADAPTER",
        help="adapter on the hub; may be given several times",
    )
    parser.add_argument("--port", type=int, default=8000, help="port that serves /metrics")
    asked = parser.parse_args(argv)
    # The first process of a container ignores SIGTERM by default, so handle it. A normal exit would wait until all
    # threads have finished their files, so exit at once.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_TERMINATED))
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ModuleNotFoundError as error:
        lacks("kvpilot-prefetch", "runtime", error)
    wanted = [(asked.model, asked.revision), *((adapter, None) for adapter in asked.adapter)]
    try:
        run(wanted, Path(HF_HUB_CACHE), asked.port)
    except PreflightError as error:
        tell("refused", error.reason, error.message)
        return _AGAIN if error.reason == "HubUnreachable" else _REFUSED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
