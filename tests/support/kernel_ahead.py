"""Kernels compiled ahead of their launches, for a GPU that is not here; run in a separate process, prints JSON.

All but the driver is Triton's own: its compiler and assembler make machine code, and a launch is only recorded.
"""

import json
import logging
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kvpilot_kernels.gpu import ahead, ring

launched: list[str] = []
"""Kernels that a GPU would have run."""
compiled: list[str] = []
"""Kernels that were compiled, and not found in a cache."""
said: list[str] = []


class Launcher:
    """Launcher of one kernel."""

    def __init__(self, _source: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *_: Any) -> None:
        launched.append(self.name)


class Absent:
    """Driver of one absent H100."""

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
        """Check that it is machine code, and load nothing."""
        assert code.startswith(b"\x7fELF")
        return name, name, 32, 0, 1024

    def unload_module(self, _module: str) -> None:
        """Do nothing: nothing was loaded."""


@triton.jit  # type: ignore[untyped-decorator]
def impossible_kernel(out_ptr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fail to compile: ranges must have powers of two."""
    tl.store(out_ptr + tl.arange(0, size), 0)


def rings() -> None:
    """Launch two variants."""
    for sequences in (3, 300, 5):
        some = torch.zeros(sequences + 1, 2, dtype=torch.int32)
        ring.fill_ring_slots(torch.zeros(1, dtype=torch.int64), some[:, 0].contiguous(), some[1:, 0].contiguous(),
                             some[1:], 64, 128)  # fmt: skip


def rings_and_one_that_is_impossible() -> None:
    """Launch two variants, then the impossible one."""
    rings()
    impossible_kernel[(1,)](torch.zeros(3, dtype=torch.int32), size=3)


def told(launch: Callable[[], None]) -> dict[str, Any]:
    """Report the compilations ahead, and if `launch` could be launched."""
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
    """Start two processes, the second with the first one's cache; then compile an impossible kernel."""

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    driver.set_active(Absent())
    triton.knobs.compilation.listener = listen
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    ahead.log.addHandler(handler)
    ahead.log.setLevel("INFO")
    found = {"first": told(rings), "launched_again": told(rings)}
    ring.ring_slots_kernel.device_caches.clear()
    found["another_process"] = told(rings)
    ring.ring_slots_kernel.device_caches.clear()
    found["impossible"] = told(rings_and_one_that_is_impossible)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
