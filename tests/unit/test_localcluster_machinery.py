"""Parts of the local cluster that need no cluster for their tests: builds, processes and endpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpilot_localcluster import build, debian, recipes
from kvpilot_localcluster.errors import BuildFailed, MissingTool
from kvpilot_localcluster.recipes import BuildStep, Recipe
from kvpilot_localcluster.services import ready_endpoints

DEB822 = """\
Types: deb
# a note
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main

Types: deb
URIs: http://vendor.example/apt
Suites: stable-vendor
Components: main
"""


def test_only_the_debian_archive_is_used_and_its_suite_replaced() -> None:
    assert debian.with_suite(DEB822, "sid") == (
        "Types: deb deb-src\nURIs: http://mirror.example/debian\nSuites: sid\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian.gpg\n"
    )


def test_package_sources_in_the_one_line_format_are_read() -> None:
    lines = "deb [signed-by=/k.gpg] http://m.example/debian trixie main\ndeb http://m.example/s trixie-security main\n"
    assert "URIs: http://m.example/debian\nSuites: bookworm\n" in debian.with_suite(lines, "bookworm")
    assert "Signed-By: /k.gpg" in debian.with_suite(lines, "bookworm")
    assert "example/s" not in debian.with_suite(lines, "bookworm")


def test_on_a_machine_without_debians_archive_no_archive_is_found() -> None:
    assert debian.with_suite("deb http://ubuntu.example noble main", "sid") == ""


def test_missing_tools_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingTool, match=r"dpkg-source \(package dpkg-dev\).*openssl \(package openssl\)"):
        debian.check_tools()


def test_a_folder_of_given_programs_without_an_api_server_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    (tmp_path / "etcd").touch()
    with pytest.raises(MissingTool, match="kube-apiserver"):
        build.find()


def test_given_programs_of_the_control_plane_are_used_and_missing_ones_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    (tmp_path / "etcd").touch()
    (tmp_path / "kube-apiserver").write_text("#!/bin/sh\necho Kubernetes v1.33.2\n")
    (tmp_path / "kube-apiserver").chmod(0o755)
    found = build.build()
    assert found.version == (1, 33)
    assert len(found.missing) == 2


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without packages, because the recipe under test fetches none."""
    monkeypatch.setattr(debian.Archive, "_apt", lambda *_: "")


@pytest.mark.usefixtures("packages")
def test_an_interrupted_build_leaves_nothing_valid_and_continues_later(tmp_path: Path) -> None:
    ran: list[str] = []

    def step(name: str, *, broken: bool = False) -> BuildStep:
        def action(work: Path) -> Iterator[float]:
            yield 0.5
            ran.append(name)
            if broken:
                raise BuildFailed(name)
            (work / "bin").mkdir(exist_ok=True)
            (work / "bin" / "tool").write_text("x")

        return BuildStep(name, 1, action)

    def recipe(*steps: BuildStep) -> Recipe:
        return Recipe("test", "sid", ("tool",), lambda _: [], None, steps)

    with pytest.raises(BuildFailed, match="second"):
        list(build.make(recipe(step("first"), step("second", broken=True)), tmp_path))
    assert not list(tmp_path.glob("test-*"))
    news = list(build.make(recipe(step("first"), step("second")), tmp_path))
    assert ran == ["first", "second", "second"]
    assert [one.fraction for one in news] == sorted(one.fraction for one in news)
    assert news[-1].fraction == 1.0
    (finished,) = tmp_path.glob("test-*")
    assert sorted(file.name for file in finished.iterdir()) == ["built.json", "tool"]
    assert not (tmp_path / ".work-test").exists()
    assert [one.step for one in build.make(recipe(step("first")), tmp_path)] == ["cached"]
    assert ran == ["first", "second", "second"]


@pytest.mark.usefixtures("packages")
def test_a_build_of_an_older_recipe_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def action(work: Path) -> Iterator[float]:
        yield 0.0
        (work / "bin").mkdir()
        (work / "bin" / "tool").touch()

    recipe = Recipe("test", "sid", ("tool",), lambda _: [], None, (BuildStep("only", 1, action),))
    list(build.make(recipe, tmp_path))
    monkeypatch.setattr(build, "REVISION", recipes.REVISION + "x")
    assert [one.step for one in build.make(recipe, tmp_path)][-1] == "done"
    assert len(list(tmp_path.glob("test-*"))) == 2


def test_the_core_alone_is_enough_for_a_cluster_without_the_newer_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setenv("KVPILOT_CACHE", str(tmp_path))
    built = tmp_path / "controlplane" / "core-1" / "built.json"
    built.parent.mkdir(parents=True)
    built.write_text(f'{{"recipe": "{recipes.REVISION}"}}')
    found = build.find(newer=False)
    assert found is not None
    assert (found.kube_apiserver.parent, found.apiextensions_apiserver) == (built.parent, None)
    assert build.find() is None


def service(name: str = "web", namespace: str = "n") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {}}


def endpoint_slice(*endpoints: tuple[str, bool | None], of: str = "web", port: str = "") -> dict[str, Any]:
    return {
        "metadata": {"namespace": "n", "labels": {"kubernetes.io/service-name": of}},
        "ports": [{"name": port, "port": 8000}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": ready}} for address, ready in endpoints],
    }


def test_ready_endpoints_of_the_right_service_and_port_are_chosen() -> None:
    slices = [
        endpoint_slice(("127.0.1.1", True), ("127.0.1.2", False), ("127.0.1.3", None)),
        endpoint_slice(("127.0.1.4", True), of="other"),
        endpoint_slice(("127.0.1.5", True), port="metrics"),
    ]
    assert ready_endpoints(service(), {"port": 80}, slices) == [("127.0.1.1", 8000), ("127.0.1.3", 8000)]
    assert ready_endpoints(service(), {"port": 80, "name": "metrics"}, slices) == [("127.0.1.5", 8000)]
    assert ready_endpoints(service(namespace="m"), {"port": 80}, slices) == []
