"""Programs of the control plane. They come from KUBEBUILDER_ASSETS, from the cache, or from a build of Debian packages.

The cache is ${KVPILOT_CACHE:-~/.cache/kvpilot}/controlplane. Each finished build is a folder NAME-KEY, which is renamed
into place. KEY is a hash of the file names of all input packages, which contain their versions. If a build is killed,
its work folder remains, and the next build resumes at the unfinished step. A finished build removes the work folder.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvpilot_localcluster.cache import cache_folder
from kvpilot_localcluster.debian import Archive, check_tools
from kvpilot_localcluster.errors import BuildFailed, MissingTool
from kvpilot_localcluster.procs import write_atomically
from kvpilot_localcluster.recipes import CORE, GO_FROM_PYPI, MODERN, REVISION, Recipe

Report = Callable[[str, float], None]
"""Callback that gets the name of a step, and the finished fraction of the whole build (0 to 1)."""

MINIMUM = (1, 29)
"""Oldest Kubernetes version that kvpilot supports. If the core is older, separate servers add the missing APIs."""

_FETCH_WEIGHT = 8.0


@dataclass(frozen=True)
class Binaries:
    """Paths of the control plane's programs; None for a missing one.

    Attributes:
        version: version of the API server, as (major, minor).
    """

    etcd: Path
    kube_apiserver: Path
    kube_controller_manager: Path | None
    kube_scheduler: Path | None
    apiextensions_apiserver: Path | None
    version: tuple[int, int]

    @property
    def missing(self) -> list[str]:
        """Describe each program that a cluster lacks. Return an empty list if it has all."""
        lacks = {
            "kube-controller-manager (Deployments make no pods, nothing is collected)": self.kube_controller_manager,
            "kube-scheduler (pods stay unbound)": self.kube_scheduler,
        }
        return [name for name, path in lacks.items() if path is None]


@dataclass(frozen=True)
class Progress:
    """Progress of a build: the current step, and the finished fraction of the whole (0 to 1)."""

    step: str
    fraction: float


def builds_folder() -> Path:
    """Return the folder of finished builds."""
    return cache_folder() / "controlplane"


def find(*, newer: bool = True) -> Binaries | None:
    """Return the programs of KUBEBUILDER_ASSETS or the cache, or None if they must be built.

    With `newer`, the programs include the server that enforces CEL rules. Its build takes longer than all others
    together.

    Raises:
        MissingTool: KUBEBUILDER_ASSETS is set, but etcd or a kube-apiserver of 1.29 or newer is missing there.
    """
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        return _of_assets(Path(assets))
    core, modern = _finished(CORE), _finished(MODERN) if newer else None
    return None if core is None or (newer and modern is None) else _of_builds(core, modern)


def progress(*, newer: bool = True) -> Iterator[Progress]:
    """Build the programs that `find` misses, and yield the progress. Return at once if none is missing.

    Raises:
        MissingTool: a system tool is missing; the message names it and its package.
        BuildFailed: a step failed; finished steps are kept for the next try.
    """
    if find(newer=newer) is not None:
        return
    check_tools()
    recipes = [recipe for recipe in ((CORE, MODERN) if newer else (CORE,)) if _finished(recipe) is None]
    weights = [_FETCH_WEIGHT + sum(step.weight for step in recipe.steps) for recipe in recipes]
    done = 0.0
    for recipe, weight in zip(recipes, weights, strict=True):
        for news in make(recipe, builds_folder()):
            yield Progress(news.step, (done + news.fraction * weight) / sum(weights))
        done += weight


def build(report: Report | None = None, *, newer: bool = True) -> Binaries:
    """Return the programs. Build missing ones first, and report the progress.

    Raises:
        MissingTool, BuildFailed: as `progress`.
    """
    for news in progress(newer=newer):
        if report is not None:
            report(news.step, news.fraction)
    found = find(newer=newer)
    if found is None:
        raise BuildFailed(f"the build ended but {builds_folder()} holds no complete result: remove it and try again")
    return found


def tell(*, newer: bool = True) -> Binaries:
    """Return the programs. Build missing ones first, and print a line such as ` 42% unpack` for each percent."""
    said = ""

    def report(step: str, part: float) -> None:
        nonlocal said
        if (line := f"{part:4.0%} {step}") != said:
            print(line, flush=True)
        said = line

    return build(report, newer=newer)


def make(recipe: Recipe, cache: Path) -> Iterator[Progress]:
    """Build one recipe into a cache folder. If another process already builds there, wait for it."""
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache / f".{recipe.name}.lock"):
        if _finished(recipe, cache) is not None:
            yield Progress("cached", 1.0)
            return
        yield from _make(recipe, cache)


def _make(recipe: Recipe, cache: Path) -> Iterator[Progress]:
    started = time.time()
    total = _FETCH_WEIGHT + sum(step.weight for step in recipe.steps)
    yield Progress("look up packages", 0.0)
    scratch = cache / f".work-{recipe.name}"
    archive = Archive(scratch / "apt", recipe.suite)
    archive.update()
    packages = recipe.packages(archive)
    files = archive.files(packages, source=recipe.source)
    key = _key(files)
    if (scratch / "key").exists() and (scratch / "key").read_text() != key:
        # The packages have changed since the interrupted build, so its intermediate files are of no use.
        shutil.rmtree(scratch)
        archive.update()
    (scratch / "key").write_text(key)
    yield Progress("download", 0.2 * _FETCH_WEIGHT / total)
    archive.fetch(packages, source=recipe.source)
    done = _FETCH_WEIGHT
    for number, step in enumerate(recipe.steps):
        stamp = scratch / f"done-{number}"
        if not stamp.exists():
            for part in step.action(scratch):
                yield Progress(step.name, (done + part * step.weight) / total)
            stamp.touch()
        done += step.weight
    _finish(recipe, cache, scratch, key, {"files": files, "seconds": round(time.time() - started)})
    yield Progress("done", 1.0)


def _finish(recipe: Recipe, cache: Path, scratch: Path, key: str, facts: Mapping[str, object]) -> None:
    for name in recipe.programs:
        program = scratch / "bin" / name
        if not program.is_file():
            raise BuildFailed(f"{recipe.name}: the build left no {name} in {program.parent}")
        program.chmod(0o755)
    write_atomically(scratch / "bin" / "built.json", json.dumps({"recipe": REVISION, **facts}, indent=1))
    target = cache / f"{recipe.name}-{key}"
    shutil.rmtree(target, ignore_errors=True)
    (scratch / "bin").rename(target)
    shutil.rmtree(scratch)


def _key(files: Sequence[str]) -> str:
    return hashlib.sha256("\n".join([REVISION, GO_FROM_PYPI, *files]).encode()).hexdigest()[:12]


def _finished(recipe: Recipe, cache: Path | None = None) -> Path | None:
    """Return the newest finished build of the current recipe. This needs no network."""
    builds = (cache or builds_folder()).glob(f"{recipe.name}-*/built.json")
    for record in sorted(builds, key=lambda file: file.stat().st_mtime, reverse=True):
        if json.loads(record.read_text())["recipe"] == REVISION:
            return record.parent
    return None


def _of_builds(core: Path, modern: Path | None) -> Binaries:
    paths = [core / name for name in CORE.programs]
    newer = None if modern is None else modern / "apiextensions-apiserver"
    return Binaries(paths[0], paths[1], paths[2], paths[3], newer, (1, 20))


def _of_assets(folder: Path) -> Binaries:
    def optional(name: str) -> Path | None:
        return folder / name if (folder / name).is_file() else None

    for name in ("etcd", "kube-apiserver"):
        if optional(name) is None:
            raise MissingTool(f"KUBEBUILDER_ASSETS={folder} holds no {name}: correct it, or unset it to build our own")
    answer = subprocess.run(
        [folder / "kube-apiserver", "--version"], capture_output=True, text=True, check=False
    ).stdout
    found = re.search(r"v(\d+)\.(\d+)", answer)
    if found is None:
        raise MissingTool(f"{folder / 'kube-apiserver'} does not tell its version: {answer!r}")
    version = (int(found[1]), int(found[2]))
    if version < MINIMUM:
        raise MissingTool(
            f"KUBEBUILDER_ASSETS={folder} holds Kubernetes {found[0]}: give 1.29 or newer, or unset it to build our own"
        )
    return Binaries(
        folder / "etcd",
        folder / "kube-apiserver",
        optional("kube-controller-manager"),
        optional("kube-scheduler"),
        None,
        version,
    )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
