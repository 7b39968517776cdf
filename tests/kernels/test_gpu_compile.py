"""The kernels compile to machine code with the installed Triton, which a GPU would otherwise be the first to try."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(capability: int, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), str(capability)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = {line.split()[0] for line in done.stdout.splitlines() if "_kernel" in line}
    assert kernels == {f"{name}_kernel" for name in ("store", "gather", "plan", "ring_slots", "reduce", "decode")}
