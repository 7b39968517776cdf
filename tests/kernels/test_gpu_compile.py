"""The kernels compile to machine code with the installed Triton, which a GPU would otherwise be the first to try."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).parents[2] / "kernels" / "benchmarks" / "kernel_resources.py"


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_kernels_compile_and_fit_on_a_gpu_that_is_not_here(capability: int, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(COMMAND), "--few", "--processes", "1", "--capabilities", str(capability)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    kernels = {line.split()[0] for line in done.stdout.splitlines() if "_kernel" in line}
    assert kernels == {f"{name}_kernel" for name in ("store", "gather", "plan", "ring_slots", "reduce", "decode")}
