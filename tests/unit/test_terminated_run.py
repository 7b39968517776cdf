"""A terminated test run ends every process that it started."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpilot_localcluster import procs

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TEST = """
from pathlib import Path
from kvpilot_localcluster.engines.real import process_group

HERE = Path(__file__).parent

def test_waits():
    script = f"tail -f /dev/null & echo $! > {HERE}/pid.part; mv {HERE}/pid.part {HERE}/pid; wait"
    with process_group(["sh", "-c", script], HERE / "log", {}) as process:
        (HERE / "within").touch()
        process.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_programs_of_an_engine_end_with_their_run(tmp_path: Path, number: int) -> None:
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "test_it.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path, start_new_session=True) as run:
        while not all((tmp_path / name).exists() for name in ("pid", "within")):
            assert run.poll() is None, "the run ended by itself"
            time.sleep(0.02)
        pid = int((tmp_path / "pid").read_text())
        assert procs.start_time(pid) is not None
        os.kill(run.pid, number)
        assert run.wait(300) == 2
    deadline = time.monotonic() + 60
    while procs.start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert procs.start_time(pid) is None
