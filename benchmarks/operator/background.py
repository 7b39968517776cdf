"""Occupy a share of one core, as load for other benchmarks: `python -m benchmarks.operator.background SHARE`.

`taking` starts as many of these programs as it needs for a number of cores.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

SLICE_SECONDS = 0.02


@contextlib.contextmanager
def taking(cores: float) -> Iterator[None]:
    """Occupy this many cores inside the `with` block, by as few processes as possible."""
    number = max(1, -int(-cores // 1))
    command = [sys.executable, __file__, str(cores / number)]
    programs = [subprocess.Popen(command) for _ in range(number)] if cores > 0 else []
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def take(share: float) -> None:
    """Occupy this share of one core (0 to 1) forever, or as much as other processes leave."""
    began = time.monotonic()
    while True:
        if time.process_time() < share * (time.monotonic() - began):
            ends = time.process_time() + share * SLICE_SECONDS
            while time.process_time() < ends:
                pass
        else:
            time.sleep(SLICE_SECONDS / 4)


if __name__ == "__main__":
    take(float(sys.argv[1]))
