"""Release scripts: the audit distinguishes a vulnerability from a missing answer, and all packages are hashed."""

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from locks import hashes, pinned

ROOT = Path(__file__).parents[2]
KNOWN = {"id": "PYSEC-1", "affected": [{"package": {"ecosystem": "PyPI", "name": "idna"}}]}


@contextmanager
def vulnerabilities(of: str, status: int) -> Iterator[str]:
    """Serve OSV's API on loopback. It knows one vulnerability, which is in the package `of`."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = {"vulns": [KNOWN]} if asked["package"]["name"] == of else {}
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing, so that the output is the script's alone."""

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/query"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def small_env(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the environment that builds the wheel. It is small, so this is quick."""
    folder = tmp_path_factory.mktemp("small") / "env"
    subprocess.run([ROOT / "scripts/locked.sh", folder, ROOT / "docker/build.lock"], check=True, capture_output=True)
    return folder


def audit(env: Path, url: str) -> tuple[int, str]:
    command = [ROOT / "scripts/audit.sh", env, "--vulnerability-service", "osv", "--osv-url", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "NO_PROXY": "*"})
    return done.returncode, done.stderr


def test_an_audit_without_known_vulnerabilities_passes(small_env: Path) -> None:
    packages = len(pinned(ROOT / "docker/build.lock"))
    with vulnerabilities("none", 200) as url:
        status, said = audit(small_env, url)
    assert status == 0
    assert said.endswith(f"audit: no vulnerability is known in {packages} packages\n")


def test_an_audit_ends_with_1_and_names_a_known_vulnerability(small_env: Path) -> None:
    with vulnerabilities("pathspec", 200) as url:
        status, said = audit(small_env, url)
    assert status == 1
    assert re.search(r"^audit: pathspec \S+: PYSEC-1, fixed in ", said, re.MULTILINE)


def test_an_audit_without_an_answer_of_the_service_exits_with_2_and_says_so(small_env: Path) -> None:
    with vulnerabilities("none", 503) as url:
        status, said = audit(small_env, url)
    assert status == 2
    assert "audit: no package was judged" in said


@pytest.mark.parametrize("lock", ["release", "uv"])
def test_a_lock_of_tools_has_a_hash_for_every_package(lock: str) -> None:
    assert all(hashes(ROOT / f"scripts/{lock}.lock").values())
    assert hashes(ROOT / f"scripts/{lock}.lock")


def test_cached_locked_packages_are_installed_without_an_index(small_env: Path, tmp_path: Path) -> None:
    """Each package is requested only once. A slow index once made the operator's environment take nine minutes."""
    nowhere = {**os.environ, **dict.fromkeys(["ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9")}
    command = [ROOT / "scripts/locked.sh", tmp_path / "env", ROOT / "docker/build.lock"]
    subprocess.run(command, check=True, capture_output=True, env=nowhere)
    assert (tmp_path / "env/bin/hatchling").exists()


def test_a_file_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    lock = tmp_path / "other.lock"
    text = (ROOT / "docker/build.lock").read_text()
    lock.write_text(re.sub(r"sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, text))
    done = subprocess.run(
        [ROOT / "scripts/locked.sh", tmp_path / "env", lock], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "hash" in done.stderr.lower()


def scripts_of(job: dict[str, object]) -> list[Path]:
    """Return our scripts that a job runs, and the scripts that they call."""
    found = [ROOT / one for one in re.findall(r"scripts/\w+\.sh", str(job))]
    for script in found:
        below = [ROOT / "scripts" / one for one in re.findall(r"(\w+\.sh)\b", script.read_text())]
        found += [one for one in below if one.is_file() and one not in found]
    return found


def test_a_job_that_may_sign_installs_packages_only_by_their_hash() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]
    signing = [job for job in jobs.values() if job.get("permissions", {}).get("id-token") == "write"]
    scripts = {script for job in signing for script in scripts_of(job)}
    assert {"audit.sh", "locked.sh", "uv.sh"} <= {script.name for script in scripts}
    commands = [line for one in [*scripts] for line in one.read_text().splitlines() if not line.startswith("#")]
    commands += [step["run"] for job in signing for step in job["steps"] if "run" in step]
    installs = [one for one in commands if re.search(r"\b(pip3?|uv|pipx|npm|go)\b.* install\b", one)]
    assert installs
    assert [one for one in installs if "--require-hashes" not in one and "--no-index" not in one] == []
