"""If this machine lacks the memory for offloading, preflight refuses it and names the sizes."""

import pytest

from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.check import check
from kvpilot_smallmodels.models import tiny_gemma3
from support.preflights import asked, refusal

H200 = machine.Gpu("NVIDIA H200", 141 * 2**30, 0, (9, 0))


def test_vllms_simple_offloading_is_refused_only_with_our_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")
    error = refusal(asked("--kv-offloading-size=1"))
    assert error.reason == "BadArguments"
    assert all(word in error.message for word in ("VLLM_USE_SIMPLE_KV_OFFLOAD", "'k4v4'", "leave it out"))
    check(asked("--kv-offloading-size=1", dtype="auto"))


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "much"])
@pytest.mark.parametrize("dtype", ["k4v4", "auto"])
def test_offloading_without_memory_is_refused(value: str, dtype: str) -> None:
    error = refusal(asked("--kv-offloading-size", value, dtype=dtype))
    assert error.reason == "BadArguments"
    assert "--kv-offloading-size is" in error.message
    assert "GiB above 0" in error.message


@pytest.mark.parametrize("dtype", ["k4v4", "auto"])
def test_offloading_more_than_this_machine_has_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 12 * 2**30)
    check(asked("--kv-offloading-size=4", "--kv-cache-memory-bytes=64M", dtype=dtype))
    # Offloaded pages take memory in addition to weights, cache and engine, which take about 2.5 GiB here.
    beside = refusal(asked("--kv-offloading-size=10", "--kv-cache-memory-bytes=64M", dtype=dtype))
    assert beside.reason == "DoesNotFit"
    several = refusal(asked("--kv-offloading-size=7", "--data-parallel-size=2", dtype=dtype))
    assert several.reason == "DoesNotFit"
    assert all(word in several.message for word in ("14.0 GiB", "12.0 GiB", "offload less"))


def test_swap_does_not_count_as_memory_for_offloaded_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": ["MemTotal: 33554432 kB", "MemAvailable: 8388608 kB", "SwapFree: 67108864 kB"],
             "/sys/fs/cgroup/memory.max": ["max"], "/sys/fs/cgroup/memory.current": ["0"]}  # fmt: skip
    monkeypatch.setattr(machine, "lines", lambda path: files.get(path, []))
    error = refusal(asked("--kv-offloading-size=10", "--kv-cache-memory-bytes=64M"))
    assert error.reason == "DoesNotFit"
    assert all(word in error.message for word in ("10.0 GiB", "8,192 MiB", "offload less"))
    check(asked("--kv-offloading-size=1", "--kv-cache-memory-bytes=64M"))


def test_on_a_gpu_offloaded_pages_must_fit_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "platform", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [H200])
    monkeypatch.setattr(machine, "available_memory", lambda: 64 * 2**30)
    monkeypatch.setattr(machine, "shared_memory", lambda: 2**26)
    error = refusal(asked("--kv-offloading-size=4"))
    assert error.reason == "DoesNotFit"
    assert all(word in error.message for word in ("4,096 MiB", "64 MiB", "shm", "mount a larger"))
    monkeypatch.setattr(machine, "shared_memory", lambda: 2**33)
    check(asked("--kv-offloading-size=4"))


def test_offloading_a_model_with_window_layers_is_refused_only_with_our_dtypes() -> None:
    model = str(tiny_gemma3())
    error = refusal(asked("--kv-offloading-size=1", model=model))
    assert error.reason == "DtypeUnsupported"
    assert all(word in error.message for word in ("--kv-offloading-size", "sliding-window layers", "leave it out"))
    check(asked("--kv-offloading-size=1", model=model, dtype="auto"))
