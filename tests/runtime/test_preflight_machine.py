"""Preflight on machines whose properties are unknown: it leaves the check to vLLM."""

import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_runtime import serve
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.check import check
from kvpilot_runtime.preflight.request import Request
from kvpilot_smallmodels.models import tiny_llama

UNKNOWN = ["[Insufficient Permissions]", "[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[GPU is lost]", ""]
"""Texts that nvidia-smi prints instead of a figure."""

FIGURES = {"memory.total": "81559", "memory.used": "4", "compute_cap": "9.0"}
MIB = 2**20


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Pretend that nvidia-smi prints these lines, and that vLLM is built for GPUs."""
    monkeypatch.setattr(machine, "platform", lambda: "cuda")

    def prints(*lines: str, code: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + f"\nEND\nexit {code}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return prints


@pytest.mark.parametrize("dtype", ["auto", "fp8", "k4v4"])
@pytest.mark.parametrize("word", UNKNOWN)
def test_a_mig_slice_with_unknown_figures_is_served(smi: Any, dtype: str, word: str) -> None:
    smi(f"NVIDIA A100-SXM4-40GB, {word}, {word}, 8.0")
    check(Request(str(tiny_llama()), dtype))


def test_kvpilot_serve_starts_vllm_on_a_mig_slice_that_nvidia_smi_may_not_read(
    smi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi("NVIDIA H100 80GB HBM3, [Insufficient Permissions], [Insufficient Permissions], 9.0")
    started: list[Any] = []
    monkeypatch.setattr(serve.os, "execve", lambda *arguments: started.append(arguments))
    serve.main([f"--model={tiny_llama()}", "--kv-cache-dtype=auto"])
    assert started


lines = st.fixed_dictionaries({name: st.sampled_from([value, *UNKNOWN]) for name, value in FIGURES.items()})


@given(st.lists(lines, min_size=1, max_size=4), st.sampled_from(["NVIDIA H100, 80GB", "NVIDIA L4", *UNKNOWN]))
def test_a_gpu_with_unknown_figures_still_counts(listed: list[dict[str, str]], name: str) -> None:
    found = machine.parse_gpus(
        "\n".join(", ".join([name, *(fields[figure] for figure in FIGURES)]) for fields in listed)
    )
    assert len(found) == len(listed)
    for gpu, fields in zip(found, listed, strict=True):
        read = {"memory.total": gpu.total, "memory.used": gpu.used, "compute_cap": gpu.capability}
        assert {name for name, value in read.items() if value is None} == {
            name for name, value in fields.items() if value in UNKNOWN
        }
        assert gpu.total in (None, 81559 * MIB)
        assert gpu.used in (None, 4 * MIB)
        assert gpu.name


@given(st.text(max_size=80))
def test_any_output_of_nvidia_smi_is_read_without_an_error(text: str) -> None:
    for gpu in machine.parse_gpus(text):
        assert gpu.total is None or gpu.total > 0
        assert gpu.used is None or gpu.used >= 0


def test_a_gpu_that_does_not_fit_is_refused_beside_a_gpu_without_facts(smi: Any) -> None:
    smi("NVIDIA H100, [N/A], [N/A], [N/A]", "NVIDIA H100, 1024, 0, 9.0")
    with pytest.raises(PreflightError) as caught:
        check(Request(str(tiny_llama()), "auto", tensor_parallel=2))
    assert caught.value.reason == "DoesNotFit"
    smi("NVIDIA H100, [N/A], [N/A], [N/A]", "Tesla T4, [N/A], [N/A], 7.5")
    with pytest.raises(PreflightError, match=r"needs compute capability 8\.0"):
        check(Request(str(tiny_llama()), "k4v4", tensor_parallel=2))


def test_unknown_used_memory_counts_as_0(smi: Any) -> None:
    smi("NVIDIA L4, 1024, [N/A], 8.9")
    with pytest.raises(PreflightError, match="do not fit in"):
        check(Request(str(tiny_llama()), "auto"))


@pytest.mark.parametrize("said", ["", 'Field "compute_cap" is not a valid field to query.'])
def test_a_driver_whose_gpus_cannot_be_listed_is_left_to_vllm(
    smi: Any, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    smi(said, code=2)
    monkeypatch.setattr(machine, "may_have_gpus", lambda: True)
    check(Request(str(tiny_llama()), "k4v4"))
    monkeypatch.setattr(machine, "may_have_gpus", lambda: False)
    with pytest.raises(PreflightError, match="no GPU is visible"):
        check(Request(str(tiny_llama()), "k4v4"))


def test_unknown_memory_of_a_machine_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "lines", lambda _: [])
    check(Request(str(tiny_llama()), "auto"))
    monkeypatch.setattr(machine, "lines", lambda path: ["2048"] if path.endswith("memory.max") else [])
    with pytest.raises(PreflightError, match="do not fit in 0 MiB"):
        check(Request(str(tiny_llama()), "auto"))
