"""Completion of `kubectl kvpilot` in a shell: commands, options, and the names in the cluster."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubectl_runs import COMMANDS, serving_chat
from loopback_api import LoopbackApi

from kvpilot_kubectl import complete


@pytest.fixture
def api(tmp_path: Path) -> Iterator[LoopbackApi]:
    with serving_chat(tmp_path) as api:
        yield api


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([""], list(COMMANDS)),
        (["p"], ["pause", "promote"]),
        (["status", ""], ["chat"]),
        (["why", "x"], []),
        (["status", "--context", ""], ["bare", "here"]),
        (["status", "-n", ""], ["models", "other"]),
        (["status", "--all"], ["--all-namespaces"]),
    ],
    ids=" ".join,
)
def test_completion_knows_commands_options_and_what_the_cluster_has(
    api: LoopbackApi, monkeypatch: pytest.MonkeyPatch, words: list[str], found: list[str]
) -> None:
    names = [{"metadata": {"name": one}} for one in ("models", "other")]
    api.answers["/api/v1/namespaces"] = (200, json.dumps({"items": names}).encode())
    before = dict(os.environ)
    # Every argument but the last may name the cluster, too.
    assert complete.candidates(["--kubeconfig", str(api.kubeconfig), *words]) == found
    assert dict(os.environ) == before


def test_completion_without_a_cluster_completes_nothing(api: LoopbackApi) -> None:
    assert complete.candidates(["--kubeconfig", "/no-such-file", "status", ""]) == []


def test_kubectl_is_told_to_offer_files_only_where_one_is_wanted() -> None:
    program = Path(sys.executable).with_name("kubectl_complete-kvpilot")
    for words, last in ((["sta"], "status\n:4\n"), (["status", "--kubeconfig", ""], ":0\n"), ([], None)):
        done = subprocess.run([program, *words], capture_output=True, text=True, check=True, timeout=600)
        assert done.stderr == ""
        assert done.stdout == last if last is not None else done.stdout.endswith("why\n:4\n")
