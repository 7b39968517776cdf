"""`kvpilot_demo --gpu` names what is missing before it starts anything, and keeps partial results."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpilot_demo import gpus
from kvpilot_demo.story import Record
from kvpilot_demo.summary import figures
from kvpilot_localcluster.gpus import Gpu
from kvpilot_operator.api.faults import faults as spec_faults
from support.crd import apply_defaults

FREE = Gpu(0, "GPU-aa", "NVIDIA H100 80GB HBM3", 81559, 0, "9.0", mig=False, driver="580.159.04")
TORCH = ("2.11.0+cu130", "13.0", 3)


def three(**changes: Any) -> list[Gpu]:
    return [FREE, dataclasses.replace(FREE, index=1, **changes), dataclasses.replace(FREE, index=2)]


def test_three_free_gpus_and_a_torch_that_fits_the_driver_are_enough() -> None:
    assert gpus.faults(three(), "13.0", TORCH) == []


@pytest.mark.parametrize(("changes", "words"), [
    ({"mig": True}, "GPU 1 .*mig.mode.current is Enabled.*use a host without MIG"),
    ({"memory": 8192}, "memory.total is 8192 MiB, but 16000 MiB are needed for the engines"),
    ({"used": 40_000}, "memory.used is 40000 MiB .*unknown to nvidia-smi.*end these processes"),
    ({"processes": (4711,)}, "processes: 4711"),
])  # fmt: skip
def test_an_error_names_a_gpu_that_cannot_be_used(changes: dict[str, Any], words: str) -> None:
    (fault,) = gpus.faults(three(**changes), "13.0", TORCH)
    with pytest.raises(RuntimeError, match=words):
        raise RuntimeError(fault)


@pytest.mark.parametrize(("torch", "words"), [
    (("2.13.0+cpu", None, 0), "is built without CUDA"),
    (("2.11.0+cu130", "13.0", 0), "needs a driver for CUDA 13.0.*up to CUDA 12.2.*update the driver"),
    (("2.11.0+cu130", "13.0", 1), "CUDA_VISIBLE_DEVICES: torch sees 1 of 3 GPUs"),
    ("ModuleNotFoundError: No module named 'vllm'", "No module named 'vllm': install kvpilot and the CUDA builds"),
])  # fmt: skip
def test_an_error_names_a_torch_that_cannot_use_the_driver(torch: Any, words: str) -> None:
    (fault,) = gpus.faults(three(), "12.2", torch)
    with pytest.raises(RuntimeError, match=words):
        raise RuntimeError(fault)


def test_fewer_gpus_are_enough_if_their_memory_is_enough_for_several_engines() -> None:
    assert gpus.faults([FREE], "13.0", (*TORCH[:2], 1)) == []
    small = dataclasses.replace(FREE, memory=24_000)
    assert gpus.faults([small] * 3, "13.0", TORCH) == []
    assert (
        "but 32000 MiB are needed for the engines that run on it at a time (2): use"
        in gpus.faults([small] * 2, "13.0", TORCH)[0]
    )


def test_a_machine_without_gpus_is_refused_before_anything_starts(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path), "KVPILOT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "kvpilot_demo", "--gpu", "--plain"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert "demo: GPUs: nvidia-smi lists none" in done.stderr
    assert not (tmp_path / "cache" / "runs").exists()


def test_an_error_names_a_relative_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/opt/vllm:demo")
    (fault,) = gpus._programs()
    assert fault.startswith("PYTHONPATH: demo is relative")


@pytest.mark.parametrize("imagined", [True, False])
def test_the_service_of_the_demo_is_accepted(imagined: bool) -> None:
    made = apply_defaults(gpus.manifest(imagined=imagined))
    assert spec_faults(made) == ()
    assert made["spec"]["engine"]["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_the_demos_summary_shows_the_figures_that_an_incomplete_record_has() -> None:
    users = {"ok": 9, "failed": 0, "ttftMs": {"p50": 1.0, "p95": 2.0, "p99": 3.0}, "itlMs": {}}
    record = Record(seconds={"start": 2.5}, stages={"k4v4 Probing": 4.0}, trial_seconds={"k4v4": 50.0})
    record.users["start"] = users
    said = "\n".join(text for _, text in figures(record))
    assert "2.5 s  start" in said
    assert "TTFT p50/p95/p99 1/2/3 ms" in said
    assert "k4v4: 50 GPU-seconds" in said
