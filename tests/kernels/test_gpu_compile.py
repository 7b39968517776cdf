"""The kernels compile to machine code with the installed Triton, which a GPU would otherwise be the first to try."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).parents[2] / "kernels" / "benchmarks" / "kernel_resources.py"


# 86 has the shared memory of 89 and the instructions of 80, 100 has both of 90.
@pytest.mark.parametrize(
    "capability",
    [80, pytest.param(86, marks=pytest.mark.long), 89, 90, pytest.param(100, marks=pytest.mark.long), 120],
)
def test_kernels_compile_and_fit_on_a_gpu_that_is_not_here(capability: int, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(COMMAND), "--few", "--processes", "1", "--capabilities", str(capability)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    kernels = {line.split()[0] for line in done.stdout.splitlines() if "_kernel" in line}
    assert kernels == {f"{name}_kernel" for name in ("store", "gather", "plan", "ring_slots", "reduce", "decode")}
