"""Kernels are compiled before their first launch, by Triton's own compiler, for a GPU that is not here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import kernel_ahead

LAUNCHES, VARIANTS = 3, 2


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of a process that compiles; this one interprets kernels."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("ahead")), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(Path(kernel_ahead.__file__))], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_nothing_is_launched_before_all_is_compiled_and_then_all_is(told: dict[str, Any]) -> None:
    first = told["first"]
    assert first["compiled"] == ["ring_slots_kernel"] * VARIANTS
    assert first["launched_before_all_were_compiled"] == [0]
    assert first["launched"] == ["ring_slots_kernel"] * LAUNCHES
    (said,) = first["said"]
    assert said.startswith(f"INFO {VARIANTS} variants of kernels were compiled")


def test_a_launch_after_it_compiles_nothing(told: dict[str, Any]) -> None:
    assert told["launched_again"]["compiled"] == []
    assert told["launched_again"]["said"] == []


def test_another_process_finds_in_the_cache_what_the_first_compiled(told: dict[str, Any]) -> None:
    assert told["another_process"]["compiled"] == []
    assert told["another_process"]["launched"] == ["ring_slots_kernel"] * LAUNCHES


def test_a_kernel_that_does_not_compile_is_named_in_a_warning_and_fails_where_it_is_launched(
    told: dict[str, Any],
) -> None:
    found = told["impossible"]
    assert found["launched"] == ["ring_slots_kernel"] * LAUNCHES  # which come before it
    assert found["error"] == "CompilationError"
    assert found["said"][-1].startswith("WARNING kernels are compiled one after another")
    assert "impossible_kernel" in found["said"][-1]
