"""`kvpilot-prefetch` against a hub on loopback: which files it fetches and keeps, and when it refuses."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_runtime import prefetch
from kvpilot_runtime.errors import PreflightError
from support.model_hub import Hub, content_name, hub_of

MODEL = "some-team/some-model"
SHARDS = {f"model-{n}-of-2.safetensors": bytes([n]) * 200_000 for n in (1, 2)}
INDEX = json.dumps({"weight_map": dict.fromkeys(["a", "b"], "") | dict(zip("ab", SHARDS, strict=True))}).encode()
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"t" * 5000,
    "model.safetensors.index.json": INDEX,
    **SHARDS,
    "original/consolidated.pth": b"o" * 400_000,
    "pytorch_model.bin": b"p" * 400_000,
    "consolidated.safetensors": b"c" * 400_000,
}
READ = {"config.json", "tokenizer.json", "model.safetensors.index.json", *SHARDS}
SECONDS = 900


def start(home: Path, url: str, *arguments: str, port: int = 0, **environment: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    here = {"HF_ENDPOINT": url, "HF_HOME": str(home), "KVPILOT_SERVE_HOST": "127.0.0.1", **environment}
    command = [sys.executable, "-m", "kvpilot_runtime.prefetch", f"--model={MODEL}", f"--port={port}", *arguments]
    return subprocess.Popen(command, env={**clean, **here}, stderr=subprocess.PIPE, text=True)


def done(home: Path, url: str, *arguments: str, **environment: str) -> tuple[int, str]:
    process = start(home, url, *arguments, **environment)
    _, said = process.communicate(timeout=SECONDS)
    return process.returncode, said


def refusal(said: str) -> dict[str, str]:
    found = json.loads(said.strip().splitlines()[-1])
    assert found["kvpilot"] == "refused"
    return dict(found)


def snapshot(home: Path) -> set[str]:
    (folder,) = (home / "hub" / f"models--{MODEL.replace('/', '--')}" / "snapshots").iterdir()
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_engines_read_is_fetched_once_and_nothing_else(tmp_path: Path) -> None:
    with hub_of(MODEL, FILES) as hub:
        assert done(tmp_path, hub.url)[0] == 0
        assert snapshot(tmp_path) == set(hub.sent) == READ
        hub.sent.clear()
        assert done(tmp_path, hub.url)[0] == 0
        assert hub.sent == {}


def test_an_engine_without_a_network_finds_the_model_under_the_revision_that_was_asked_for(tmp_path: Path) -> None:
    with hub_of(MODEL, FILES) as hub:
        assert done(tmp_path, hub.url, "--revision=v2")[0] == 0
    find = f"from huggingface_hub import snapshot_download; print(snapshot_download({MODEL!r}, revision='v2'))"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", find]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert {path.name for path in Path(found.stdout.strip()).iterdir()} == READ


def test_a_run_that_is_killed_is_gone_on_with_at_the_file_that_it_was_at(tmp_path: Path) -> None:
    first, second = SHARDS
    with hub_of(MODEL, FILES) as hub:
        reached, never = Event(), Event()

        def hangs(name: str) -> None:
            if name == second:
                reached.set()
                never.wait(SECONDS)

        hub.before = hangs
        process = start(tmp_path, hub.url)
        assert reached.wait(SECONDS)
        blobs = tmp_path / "hub" / f"models--{MODEL.replace('/', '--')}" / "blobs"
        deadline = time.monotonic() + SECONDS
        while not (blobs / content_name(SHARDS[first])).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        process.communicate(timeout=SECONDS)
        hub.before = lambda _: None
        never.set()
        assert done(tmp_path, hub.url)[0] == 0
        assert hub.sent[first] == len(SHARDS[first])
        assert snapshot(tmp_path) == READ


def test_it_ends_at_once_when_it_is_asked_to(tmp_path: Path) -> None:
    with hub_of(MODEL, FILES) as hub:
        reached, never = Event(), Event()

        def hangs(name: str) -> None:
            if name in SHARDS:
                reached.set()
                never.wait(SECONDS)

        hub.before = hangs
        process = start(tmp_path, hub.url)
        assert reached.wait(SECONDS)
        process.terminate()
        process.communicate(timeout=SECONDS)
        never.set()
    assert process.returncode == 143


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_its_page_says_how_much_is_there_of_how_much(tmp_path: Path, address: str) -> None:
    _, second = SHARDS
    total = sum(len(FILES[name]) for name in READ)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with hub_of(MODEL, FILES) as hub:
        never = Event()

        def hangs(name: str) -> None:
            if name == second:
                never.wait(SECONDS)

        hub.before = hangs
        process = start(tmp_path, hub.url, port=port, KVPILOT_SERVE_HOST="")
        deadline, seen = time.monotonic() + SECONDS, (-1.0, -1.0)
        while seen != (total - len(SHARDS[second]), total):
            assert time.monotonic() < deadline, seen
            assert process.poll() is None
            time.sleep(0.05)
            try:
                with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=SECONDS) as answer:
                    page = answer.read().decode()
            except OSError:
                continue
            found = dict(re.findall(r"^(kvpilot_prefetch_\w+) (\S+)$", page, re.MULTILINE))
            seen = float(found["kvpilot_prefetch_bytes"]), float(found["kvpilot_prefetch_total_bytes"])
        never.set()
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("code", "said"),
    [("GatedRepo", "give a token of that account"), ("RepoNotFound", "knows no such model")],
)
def test_what_the_hub_refuses_is_told_with_the_remedy(tmp_path: Path, code: str, said: str) -> None:
    with hub_of(MODEL, FILES) as hub:
        hub.refuses = code
        status, stderr = done(tmp_path, hub.url)
    assert status == 78
    assert refusal(stderr)["reason"] == "ModelNotFound"
    assert said in refusal(stderr)["message"]


def test_a_hub_that_cannot_be_reached_is_told_and_worth_another_attempt(tmp_path: Path) -> None:
    hub = Hub(MODEL, FILES)
    hub.start()
    hub.stop()
    status, stderr = done(tmp_path, hub.url)
    assert status == 1
    assert refusal(stderr)["reason"] == "HubUnreachable"
    assert "HF_ENDPOINT" in refusal(stderr)["message"]


def test_a_token_is_in_no_message(tmp_path: Path) -> None:
    with hub_of(MODEL, FILES) as hub:
        hub.refuses = "RepoNotFound"
        _, stderr = done(tmp_path, hub.url, HF_TOKEN="hf_abcdefsecret")
    assert "abcdefsecret" not in stderr


def test_a_model_that_cannot_fit_is_refused_before_a_byte_of_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = prefetch.Part(MODEL, None, (("model.safetensors", 10**18, "ab"),))
    monkeypatch.setattr(prefetch, "plan", lambda *_: part)
    monkeypatch.setattr(prefetch, "fetch", lambda _: pytest.fail("it was fetched"))
    with pytest.raises(
        PreflightError, match=r"1000000000\.0 GB are missing.*raise spec\.cache\.weights\.size"
    ) as found:
        prefetch.run([(MODEL, None)], tmp_path, 0)
    assert found.value.reason == "VolumeFull"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "VolumeFull"),
        (OSError(122, "Disk quota exceeded"), "VolumeFull"),
        (PermissionError(13, "Permission denied"), "VolumeNotWritable"),
        (OSError(30, "Read-only file system"), "VolumeNotWritable"),
        (TimeoutError("timed out"), "HubUnreachable"),
    ],
)
def test_what_befalls_a_download_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, reason: str
) -> None:
    monkeypatch.setattr(prefetch, "plan", lambda *_: prefetch.Part(MODEL, None, ()))
    monkeypatch.setattr(prefetch, "_tell", lambda *_: None)

    def fails(_: prefetch.Part) -> None:
        raise error

    monkeypatch.setattr(prefetch, "fetch", fails)
    with pytest.raises(PreflightError) as found:
        prefetch.run([(MODEL, None)], tmp_path, 0)
    assert found.value.reason == reason


def test_begun_files_count_and_those_that_nobody_writes_to_any_more_are_removed(tmp_path: Path) -> None:
    blobs = tmp_path / f"models--{MODEL.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    part = prefetch.Part(MODEL, None, (("a", 10_000, "aa"), ("b", 10_000, "bb"), ("c", 10_000, "cc")))
    (blobs / "aa").write_bytes(b"a" * 10_000)
    (blobs / "bb.01234567.incomplete").write_bytes(b"b" * 4_096)
    (blobs / "other").write_bytes(b"o" * 50_000)
    assert part.there(tmp_path) == 14_096
    now = time.time()
    prefetch.tidy(tmp_path, MODEL, now)
    assert part.there(tmp_path) == 14_096
    prefetch.tidy(tmp_path, MODEL, now + 3600)
    assert part.there(tmp_path) == 10_000
    assert {path.name for path in blobs.iterdir()} == {"aa", "other"}


NAMES = st.sampled_from(
    [
        "config.json",
        "a.safetensors",
        "b.safetensors",
        "sub/c.safetensors",
        "a.bin",
        "a.pt",
        "a.pth",
        "a.gguf",
        "x.model",
    ]
)


@given(files=st.sets(NAMES), named=st.none() | st.lists(NAMES, max_size=3))
def test_of_any_files_one_format_of_weights_and_all_others_are_chosen(files: set[str], named: list[str] | None) -> None:
    index = None if named is None else {"weight_map": dict(enumerate(named))}
    found = prefetch.chosen(files, index)
    assert found <= files
    assert {name for name in files if name.endswith((".json", ".model"))} <= found
    if named:
        assert files & set(named) <= found
    elif {name for name in files if name.endswith((".safetensors", ".bin", ".pt"))}:
        assert len({name.rpartition(".")[2] for name in found} & {"safetensors", "bin", "pt"}) == 1
    assert not {name for name in found if name.endswith((".gguf", ".pth"))} - set(named or ())
