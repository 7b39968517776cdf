"""Preflight judges a hub model by its config.json, which it finds in the hub cache or downloads."""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.metrics import model_info
from kvpilot_runtime.preflight import hub
from kvpilot_runtime.preflight.check import check, read_config
from kvpilot_runtime.preflight.request import Request
from kvpilot_smallmodels.models import tiny_llama

MODEL, COMMIT = "some-team/some-model", "0123456789abcdef0123456789abcdef01234567"
# Use a separate process, because the client reads its environment only once. Print the command instead of running it.
BECOME = """
import json, os, sys
from kvpilot_runtime import serve
os.execve = lambda _, command, environment: (print(json.dumps([command, dict(environment)])), sys.exit(0))
sys.exit(serve.main(sys.argv[1:]))
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return a hub cache with MODEL's config.json, for the branch main and the tag v2."""
    put(tmp_path, "main", COMMIT)
    put(tmp_path, "v2", COMMIT[::-1], head_dim=40)
    return tmp_path


def put(cache: Path, revision: str, commit: str, **changes: Any) -> None:
    config = json.loads((tiny_llama() / "config.json").read_text())
    repository = cache / f"models--{MODEL.replace('/', '--')}"
    for file, text in (
        (repository / "refs" / revision, commit),
        (repository / "snapshots" / commit / "config.json", json.dumps({**config, **changes})),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def serve(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", BECOME, f"--model={MODEL}", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


def test_the_architecture_of_a_hub_model_is_passed_to_the_engine(cache: Path) -> None:
    done = serve(cache, "--kv-cache-dtype=auto")
    command, environment = json.loads(done.stdout)
    assert environment[model_info.VARIABLE] == model_info.encode(read_config(tiny_llama()))
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert MODEL in command


def test_the_requested_revision_is_judged_and_served(cache: Path) -> None:
    refused = serve(cache, "--kv-cache-dtype=k4v4", "--revision=v2")
    assert refused.returncode == 78
    assert "head_dim 40" in json.loads(refused.stderr.strip().splitlines()[-1])["message"]
    assert "--revision=v2" in json.loads(serve(cache, "--revision=v2").stdout)[0]
    assert serve(cache, "--kv-cache-dtype=k4v4").returncode == 0


def test_a_hub_model_without_a_readable_config_is_left_to_vllm(cache: Path) -> None:
    done = serve(cache, "--revision=v3", "--kv-cache-dtype=k4v4")
    _, environment = json.loads(done.stdout)
    assert model_info.VARIABLE not in environment
    assert f"config.json of {MODEL}" in done.stderr


class Hub(BaseHTTPRequestHandler):
    """Hub that refuses every model, and gives the reason."""

    code = ""

    def do_HEAD(self) -> None:
        self.send_response(404 if self.code == "RevisionNotFound" else 401)
        self.send_header("X-Error-Code", self.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("GatedRepo", "is gated: accept its terms on the hub, and give a token"),
        ("RepoNotFound", "the hub knows no such model, or shows it only to others"),
        ("RevisionNotFound", "has no revision 'v9' on the hub"),
    ],
)
def test_permanent_errors_of_the_hub_are_refused_at_once_with_the_remedy(tmp_path: Path, code: str, said: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answer", (Hub,), {"code": code}))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        here = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_CACHE": str(tmp_path)}
        environment = {**os.environ, **here, "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", BECOME, f"--model={MODEL}", "--revision=v9"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 78, done.stderr
    told = json.loads(done.stderr.strip().splitlines()[-1])
    assert told["reason"] == "ModelNotFound"
    assert said in told["message"]


def test_a_dtype_that_no_model_could_have_is_refused_before_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hub, "config_file", lambda model, _: asked.append(model))
    with pytest.raises(PreflightError, match="KVPILOT_CALIBRATION"):
        check(Request(MODEL, "k2v2", calibration="/no/such/file"))
    assert asked == []
