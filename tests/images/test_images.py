"""Both images are built on a base of Debian's packages. The operator's image also runs against a real API server.

The Dockerfiles' own bases come from registries. The base here has the same Python and Debian, without the official
image's additions (see `image_builder`).
"""

import base64
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from image_builder import BASE, Builder, bytes_in, container

from kvpilot_localcluster.cluster import LocalCluster
from kvpilot_localcluster.definitions import define
from kvpilot_localcluster.rest import until

ROOT = Path(__file__).parents[2]
SERVICES = "/apis/kvpilot.io/v1alpha1/namespaces/default/quantizedllmservices"
MEGABYTE = 1_000_000
# Folders that buildah and runc write to, whatever their options say.
TOOLS_PLACES = [Path(place) for place in ("/var/lib/containers", "/run/containers", "/run/runc")]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    if os.geteuid() != 0 and shutil.which("buildah") is None:
        pytest.skip("building needs root, or a buildah of the user's own")
    folder = tmp_path_factory.mktemp("images")
    absent = [place for place in TOOLS_PLACES if not place.exists()]
    try:
        builder = Builder(folder)
        builder.make_base()
        yield builder
    finally:
        for place in (folder, *absent):
            shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def operator(builder: Builder) -> str:
    builder.build(
        ROOT / "docker/operator.Dockerfile",
        ROOT,
        "localhost/operator",
        {"PYTHON_IMAGE": BASE, "PYTHON_DIGEST": "", "REVISION": "abc"},
    )
    return "localhost/operator"


@pytest.fixture(scope="module")
def runtime(builder: Builder) -> str:
    bases = {"PYTHON_IMAGE": BASE, "PYTHON_DIGEST": "", "VLLM_IMAGE": BASE, "VLLM_DIGEST": ""}
    builder.build(ROOT / "docker/runtime.Dockerfile", ROOT, "localhost/runtime", bases)
    return "localhost/runtime"


def test_the_operators_image_is_under_200_mb(builder: Builder, operator: str) -> None:
    with builder.mounted(operator) as root:
        whole, ours = bytes_in(root), bytes_in(root / "opt/kvpilot")
    print(f"operator image: {whole / MEGABYTE:.0f} MB, of which {ours / MEGABYTE:.0f} MB are not the base's")
    assert whole < 200 * MEGABYTE
    # The official Python image has about 130 MB, and this base has 81 MB.
    assert ours < 70 * MEGABYTE


def test_the_operators_image_runs_without_root_and_has_labels(builder: Builder, operator: str) -> None:
    config = builder.config(operator)
    assert (config["User"], config["Entrypoint"]) == ("65532:65532", ["kvpilot-operator"])
    labels = config["Labels"]
    assert isinstance(labels, dict)
    said = {name.removeprefix("org.opencontainers.image."): value for name, value in labels.items()}
    assert {**said, "version": "0.1.0", "revision": "abc", "licenses": "Apache-2.0", "base.name": BASE} == said


def test_nothing_in_the_operators_image_belongs_to_its_user(builder: Builder, operator: str) -> None:
    with builder.mounted(operator) as root:
        owned = [path for path in root.rglob("*") if path.lstat().st_uid == 65532]
        writable = [path for path in (root / "opt").rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o2]
    assert (owned, writable) == ([], [])


def test_the_build_machines_package_settings_are_not_in_the_image(builder: Builder, operator: str) -> None:
    with builder.mounted(operator) as root:
        left = [path for path in (root / "etc/pip.conf", root / "src", root / "build", root / "dist") if path.exists()]
        assert [path for path in left if path.is_dir() or path.stat().st_size > 0] == []
        assert not list((root / "opt/kvpilot").rglob("pip-*"))


def test_the_operators_container_works_on_a_read_only_root_filesystem(
    builder: Builder, operator: str, tmp_path: Path
) -> None:
    definitions = [yaml.safe_load(file.read_text()) for file in sorted((ROOT / "crds").glob("*.yaml"))]
    with LocalCluster(tmp_path / "cluster") as cluster, builder.mounted(operator) as root:
        define(cluster.rest, definitions)
        kubeconfig = portable(cluster.kubeconfig, tmp_path / "kubeconfig")
        port = free_port()
        arguments = ["--http-host=127.0.0.1", f"--http-port={port}"]
        config = {**builder.config(operator)}
        environment = config["Env"]
        assert isinstance(environment, list)
        config["Env"] = [*environment, "KUBECONFIG=/kubeconfig"]
        with container(root, tmp_path / "container", config, arguments, {kubeconfig: "/kubeconfig"}) as process:
            began = time.monotonic()
            log = tmp_path / "container/output.log"
            until(lambda: answer(port, "/healthz", process, log) == "ok\n", "/healthz")
            print(f"operator container: /healthz after {time.monotonic() - began:.1f} s")
            until(lambda: answer(port, "/readyz", process, log) == "ok\n", "/readyz")
            assert "kvpilot_" in answer(port, "/metrics", process, log)
            status = Path(f"/proc/{pid_of(port)}/status").read_text()
            assert "\nUid:\t65532\t65532\t65532\t65532\n" in status
            assert "\nCapEff:\t0000000000000000\n" in status
            cluster.rest.create(SERVICES, service())
            until(lambda: cluster.rest.get(f"{SERVICES}/chat").get("status", {}).get("conditions"), "a status")
        assert process.returncode == 0, log.read_text()[-2000:]
        assert not (root / "tmp").exists() or not list((root / "tmp").iterdir())


def test_the_runtimes_image_starts_our_entry_point_with_a_home_that_can_be_written(
    builder: Builder, runtime: str, tmp_path: Path
) -> None:
    config = builder.config(runtime)
    assert (config["User"], config["Entrypoint"]) == ("65532:65532", ["kvpilot-serve"])
    with builder.mounted(runtime) as root:
        home = (root / "home/kvpilot").stat()
        assert (home.st_uid, home.st_gid) == (65532, 0)
        assert re.search(r"(?m)^kvpilot:[^:]*:65532:65532:", (root / "etc/passwd").read_text())
        assert not (root / "tmp/dist").exists()
        with container(root, tmp_path / "run", config, ["--model=/nowhere"], {}) as process:
            process.wait(60)
        assert process.returncode == 78
        refusal = json.loads((tmp_path / "run/output.log").read_text().splitlines()[-1])
    assert (refusal["kvpilot"], refusal["reason"]) == ("refused", "ModelNotFound")


def test_a_user_that_the_cluster_chose_has_a_name_and_a_home_in_the_runtimes_image(
    builder: Builder, runtime: str, tmp_path: Path
) -> None:
    """OpenShift runs containers under a user ID of the namespace, in group 0."""
    program = "import getpass, pathlib; print(getpass.getuser(), pathlib.Path.home())"
    config = {**builder.config(runtime), "User": "1000650000:0", "Entrypoint": ["python3", "-c", program]}
    with builder.mounted(runtime) as root:
        with container(root, tmp_path / "run", config, [], {}) as process:
            process.wait(60)
        inside = [root / "home/kvpilot", *(root / "home/kvpilot").rglob("*")]
        closed = [path for path in inside if path.stat().st_gid != 0 or (path.stat().st_mode & 0o060) != 0o060]
    assert (tmp_path / "run/output.log").read_text() == "kvpilot /home/kvpilot\n"
    assert (process.returncode, closed) == (0, [])


def test_the_runtime_image_adds_only_our_wheel_to_its_base(builder: Builder, runtime: str) -> None:
    with builder.mounted(runtime) as root:
        brought = {path.name for path in root.glob("usr/local/lib/python3*/dist-packages/*")}
    assert {name for name in brought if not name.startswith("kvpilot")} == set()
    assert "kvpilot_runtime" in brought


def service() -> dict[str, object]:
    return {
        "apiVersion": "kvpilot.io/v1alpha1",
        "kind": "QuantizedLLMService",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"source": "file:///m"},
            "engine": {"image": "none"},
            "scaling": {"minReplicas": 0},
            "replicas": 0,
        },
    }


def portable(kubeconfig: Path, to: Path) -> Path:
    """Write the kubeconfig with embedded certificates, readable by everyone, because the cluster is temporary."""
    config = yaml.safe_load(kubeconfig.read_text())
    for part in (config["clusters"][0]["cluster"], config["users"][0]["user"]):
        for name in ("certificate-authority", "client-certificate", "client-key"):
            if name in part:
                content = Path(part.pop(name)).read_bytes()
                part[f"{name}-data"] = base64.b64encode(content).decode()
    to.write_text(yaml.safe_dump(config))
    to.chmod(0o644)
    return to


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answer(port: int, path: str, process: subprocess.Popen[str], log: Path) -> str:
    """Return the body of a 200 answer, or an empty one while nothing answers. Fail if the container has ended."""
    assert process.poll() is None, log.read_text()[-4000:]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as found:
            return str(found.read().decode())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return ""


def pid_of(port: int) -> int:
    """Return this machine's ID of the container's process, which has this port in its arguments."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"--http-port={port}".encode() in words and b"runc" not in words[0]:
            return int(folder.name)
    raise AssertionError(f"no process was told --http-port={port}")
