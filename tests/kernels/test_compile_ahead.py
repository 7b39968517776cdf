"""Kernels are compiled before their first launch, by Triton's own compiler, for a GPU that this machine lacks."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kvpilot_kernels.gpu.decode import schedule
from kvpilot_kernels.gpu.launch import ahead

launched: list[str] = []
"""Kernels that a GPU would have run."""
compiled: list[str] = []
"""Kernels that were compiled because no cache had them."""
said: list[str] = []


class Launcher:
    """Stand-in for the launcher of one kernel."""

    def __init__(self, _source: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *_: Any) -> None:
        launched.append(self.name)


class Absent:
    """Stand-in for Triton's driver, with one H100 that this machine lacks."""

    launcher_cls = Launcher

    @property
    def utils(self) -> "Absent":
        """Return itself."""
        return self

    def get_current_target(self) -> GPUTarget:
        """Return compute capability 9.0."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """Return the default stream."""
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """Return the properties that Triton reads."""
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name: str, code: bytes, _shared: int, _device: int) -> tuple[str, str, int, int, int]:
        """Check that `code` is machine code, and load nothing."""
        assert code.startswith(b"\x7fELF")
        return name, name, 32, 0, 1024

    def unload_module(self, _module: str) -> None:
        """Do nothing: nothing was loaded."""


@triton.jit  # type: ignore[untyped-decorator]
def impossible_kernel(out_ptr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Make compilation fail, because the size of a range must be a power of two."""
    tl.store(out_ptr + tl.arange(0, size), 0)


def plans() -> None:
    """Launch two variants of the kernel that plans the splits of a step."""
    for tile in (16, 64, 16):
        lens, splits, spans = (torch.zeros(3, *row, dtype=torch.int32) for row in ((), (4,), (2,)))
        schedule.fill_splits(lens, splits, spans, 1, tile)


def plans_and_one_that_is_impossible() -> None:
    """Launch two variants of the plan kernel, then the kernel that cannot be compiled."""
    plans()
    impossible_kernel[(1,)](torch.zeros(3, dtype=torch.int32), size=3)


def launch_all(launch: Callable[[], None]) -> dict[str, Any]:
    """Return the compilations that ran ahead, and whether `launch` succeeded."""
    for kept in (launched, compiled, said):
        kept.clear()
    error, ran_before = "", []

    def watched() -> None:
        launch()
        ran_before.append(len(launched))

    try:
        ahead.compile_ahead(watched)
    except Exception as failed:
        error = type(failed).__name__
    return {"launched": list(launched), "launched_before_all_were_compiled": ran_before[:1], "compiled": list(compiled),
            "said": list(said), "error": error}  # fmt: skip


def main() -> None:
    """Run two processes, of which the second uses the first one's cache. Then compile an impossible kernel."""

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    driver.set_active(Absent())
    triton.knobs.compilation.listener = listen
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    ahead.log.addHandler(handler)
    ahead.log.setLevel("INFO")
    found = {"first": launch_all(plans), "launched_again": launch_all(plans)}
    schedule.plan_kernel.device_caches.clear()
    found["another_process"] = launch_all(plans)
    schedule.plan_kernel.device_caches.clear()
    found["impossible"] = launch_all(plans_and_one_that_is_impossible)
    print(json.dumps(found))


LAUNCHES, VARIANTS = 3, 2


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of a process that compiles kernels. The test's own process can only interpret them."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("ahead")), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__))], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_all_kernels_are_compiled_before_the_first_launch(told: dict[str, Any]) -> None:
    first = told["first"]
    assert first["compiled"] == ["plan_kernel"] * VARIANTS
    assert first["launched_before_all_were_compiled"] == [0]
    assert first["launched"] == ["plan_kernel"] * LAUNCHES
    (said,) = first["said"]
    assert said.startswith(f"INFO {VARIANTS} variants of kernels were compiled")


def test_a_launch_after_compiling_ahead_compiles_nothing(told: dict[str, Any]) -> None:
    assert told["launched_again"]["compiled"] == []
    assert told["launched_again"]["said"] == []


def test_another_process_finds_in_the_cache_what_the_first_compiled(told: dict[str, Any]) -> None:
    assert told["another_process"]["compiled"] == []
    assert told["another_process"]["launched"] == ["plan_kernel"] * LAUNCHES


def test_a_kernel_that_does_not_compile_is_logged_and_fails_at_its_launch(
    told: dict[str, Any],
) -> None:
    found = told["impossible"]
    assert found["launched"] == ["plan_kernel"] * LAUNCHES  # These kernels come first.
    assert found["error"] == "CompilationError"
    assert found["said"][-1].startswith("WARNING kernels are compiled one after another")
    assert "impossible_kernel" in found["said"][-1]


if __name__ == "__main__":
    main()
