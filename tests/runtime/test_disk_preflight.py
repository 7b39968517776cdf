"""The disk tier in kvpilot-serve: the options that it refuses, and the arguments that it passes to vLLM."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpilot_runtime import serve
from kvpilot_runtime.config import offload
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.check import check
from kvpilot_runtime.vllm_api import compat
from kvpilot_smallmodels.models import tiny_llama
from support.small_volumes import small_volume

HOST = "--kv-offloading-size=0.25"
DTYPES = pytest.mark.parametrize("dtype", ["k4v4", "auto"])


def arguments(path: Path | str, *more: str, size: str = "0.01", dtype: str = "k4v4") -> list[str]:
    return [f"--model={tiny_llama()}", f"--kv-cache-dtype={dtype}", f"--kv-offloading-disk-path={path}",
            f"--kv-offloading-disk-size={size}", "--kv-cache-memory-bytes=64M", *more]  # fmt: skip


def refusal(given: list[str]) -> PreflightError:
    with pytest.raises(PreflightError) as caught:
        check(serve.parse(given)[0])
    return caught.value


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 1 MiB."""
    with small_volume(tmp_path, "1m"):
        yield tmp_path


@DTYPES
def test_a_folder_with_room_is_taken_and_left_as_it_was(tmp_path: Path, dtype: str) -> None:
    check(serve.parse(arguments(tmp_path, HOST, dtype=dtype))[0])
    assert list(tmp_path.iterdir()) == []


@DTYPES
def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path, dtype: str) -> None:
    error = refusal(arguments(tmp_path / "claim", HOST, dtype=dtype))
    assert error.reason == "BadArguments"
    assert all(word in error.message for word in ("--kv-offloading-disk-path", str(tmp_path / "claim"), "mounted"))


def test_a_volume_with_less_room_than_is_asked_for_is_refused_with_the_numbers(tmp_path: Path) -> None:
    error = refusal(arguments(tmp_path, HOST, size="1000000"))
    assert error.reason == "VolumeFull"
    assert all(word in error.message for word in ("1,000,000.0 GiB", "GiB are free", "larger volume"))


def test_each_engine_of_data_parallelism_needs_room_for_a_file_of_its_own(mounted: Path) -> None:
    size = str(0.6 * 2**-10)
    check(serve.parse(arguments(mounted, HOST, size=size))[0])
    assert refusal(arguments(mounted, HOST, "--data-parallel-size=2", size=size)).reason == "VolumeFull"


def test_a_full_volume_is_refused(mounted: Path) -> None:
    (mounted / "weights").write_bytes(bytes(2**20))
    error = refusal(arguments(mounted, HOST, size="0.0001"))
    assert error.reason == "VolumeFull"
    assert all(word in error.message for word in (str(mounted), "make room"))


def test_a_read_only_volume_is_refused_with_the_remedy(mounted: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    error = refusal(arguments(mounted, HOST, size="0.0001"))
    assert error.reason == "VolumeNotWritable"
    assert all(word in error.message for word in (str(mounted), "Read-only", "fsGroup"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--kv-offloading-disk-path=/x"], ("--kv-offloading-disk-size", "give both")),
        (["--kv-offloading-disk-size=4"], ("--kv-offloading-disk-path", "give both")),
        (["--kv-offloading-disk-path=/x", "--kv-offloading-disk-size=4"], ("--kv-offloading-size", "leave it out")),
    ],
)
def test_a_disk_alone_is_refused(given: list[str], words: tuple[str, ...]) -> None:
    error = refusal([f"--model={tiny_llama()}", *given])
    assert error.reason == "BadArguments"
    assert all(word in error.message for word in words)


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "4Gi"])
def test_a_size_that_is_none_is_refused(tmp_path: Path, size: str) -> None:
    error = refusal(arguments(tmp_path, HOST, size=size))
    assert error.reason == "BadArguments"
    assert "GiB above 0" in error.message


@DTYPES
@pytest.mark.parametrize(
    ("more", "word"),
    [(["--kv-transfer-config={}"], "--kv-transfer-config"), (["--kv-offloading-backend=lmcache"], "lmcache"),
     (["--nnodes=2"], "nnodes")],
)  # fmt: skip
def test_what_does_not_go_with_a_disk_is_refused_by_name(
    tmp_path: Path, more: list[str], word: str, dtype: str
) -> None:
    error = refusal(arguments(tmp_path, HOST, *more, dtype=dtype))
    assert error.reason == "BadArguments"
    assert all(part in error.message for part in (word, "leave"))


def test_vllms_simple_offloading_is_refused_beside_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")
    error = refusal(arguments(tmp_path, HOST, dtype="auto"))
    assert "VLLM_USE_SIMPLE_KV_OFFLOAD" in error.message


def test_another_vllm_is_refused_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpilot_runtime.vllm_api.compat.version_text", lambda: "0.33.1")
    assert compat.lacks(compat.PINNED) == "vLLM 0.32 (here is 0.33.1)"
    error = refusal(arguments(tmp_path, HOST))
    assert error.reason == "BadArguments"
    assert all(word in error.message for word in ("vLLM 0.32", "0.33.1", "leave it out"))


def test_above_a_disk_host_memory_is_in_shared_memory_also_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "shared_memory", lambda: 2**26)
    assert refusal(arguments(tmp_path, HOST)).reason == "DoesNotFit"
    check(serve.parse([f"--model={tiny_llama()}", HOST, "--kv-cache-memory-bytes=64M"])[0])


def test_vllm_is_asked_for_the_tier_that_our_backend_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(serve, "_become_vllm", lambda arguments, _: became.append(arguments) or 0)
    assert serve.main(arguments(tmp_path, HOST)) == 0
    (given,) = became
    transfer = json.loads(given[given.index("--kv-transfer-config") + 1])
    assert HOST in given
    assert not any(one.startswith("--kv-offloading-disk") for one in given)
    tier: dict[str, Any] = transfer["kv_connector_extra_config"]["secondary_tiers"][0]
    assert (tier["path"], tier["size_bytes"]) == (str(tmp_path), int(0.01 * 2**30))
    assert offload.unsupported(SimpleNamespace(**transfer), "cuda") is None
    tier["type"] = "fs"
    assert offload.unsupported(SimpleNamespace(**transfer), "cuda") == "the tier 'fs' below host memory"
