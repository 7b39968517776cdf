"""Run a vLLM engine in a child process with our plugin, without network, and with a time limit."""

import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
_GROUP = "vllm.general_plugins"
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer may be missing, and this benchmark does not sample.
}


class ChildFailedError(RuntimeError):
    """Error for a child process that failed or exceeded its time limit. The message has the errors from its log."""


def say(text: str) -> None:
    """Print a line of progress with the time of day."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


@contextlib.contextmanager
def environment(extra: dict[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Yield the environment of an engine: our packages on the path, no network, and our plugin for vLLM.

    Every process of vLLM finds plugins by the entry points of installed distributions. If kvpilot is not installed, add
    a folder with the same entry point to the path.
    """
    with tempfile.TemporaryDirectory(prefix="kvpilot-plugin-") as folder:
        paths = [str(ROOT), *(str(ROOT / name) for name in ("runtime", "kernels", "formats"))]
        if not any(point.name == "kvpilot" for point in entry_points(group=_GROUP)):
            info = Path(folder, "kvpilot_checkout-0.dist-info")
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpilot-checkout\nVersion: 0\n")
            (info / "entry_points.txt").write_text(f"[{_GROUP}]\nkvpilot = kvpilot_runtime.plugin:register\n")
            paths.append(folder)
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([*paths, *([inherited] if inherited else [])])
        yield {**os.environ, **_OFFLINE, "PYTHONPATH": path, **(extra or {})}


def run_child(module: str, job: Path, log: Path, limit_s: float, env: dict[str, str]) -> None:
    """Run a module on a job file. Kill it and its children after `limit_s` seconds.

    Its output goes to `log`. Lines that it prints by `say` also go to our output.

    Raises:
        ChildFailedError: the module ended with an error, or was killed.
    """
    command = [sys.executable, "-m", module, str(job)]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, start_new_session=True, text=True,
        errors="replace", bufsize=1,
    )  # fmt: skip
    assert child.stdout is not None  # noqa: S101  # for mypy: a pipe was requested
    reader = threading.Thread(target=_tee, args=(child.stdout, log), daemon=True)
    reader.start()
    try:
        code: int | None = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        # Kill the group even after a clean exit, because a worker that outlives its engine would keep GPU memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        # Wait for the end of the output. Processes that compile have their own session and hold the pipe open, until
        # they end a moment after their parent.
        reader.join(10)
    if code != 0:
        print(*log.read_text().splitlines()[-60:], sep="\n", flush=True)
        what = f"still running after {limit_s:.0f} s" if code is None else f"ended with {code}"
        raise ChildFailedError("; ".join([what, *error_lines(log)]))


def end_with_parent() -> None:
    """Kill this child's process group as soon as its parent has ended, so that no engine outlives it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _tee(source: IO[str], log: Path) -> None:
    with log.open("w") as file:
        for line in source:
            file.write(line)
            file.flush()
            if re.match(r"\[\d\d:\d\d:\d\d\] ", line):
                print(line, end="", flush=True)


def error_lines(log: Path) -> list[str]:
    """Return the lines of the first and of the last exception in a log."""
    found = re.findall(r"\b\w*(?:Error|Exception): [^\n]+", log.read_text())
    return list(dict.fromkeys([*found[:1], *found[-1:]]))


def attention_lines(log: Path) -> list[str]:
    """Return vLLM's log lines about attention backend and cache layout, each once."""
    chosen = r"Using [^\n]{0,80}?(?:[Aa]ttention backend|FlashAttention version \d|KV cache layout)"
    found = re.findall(chosen, log.read_text())
    return list(dict.fromkeys(found))


def versions() -> dict[str, str]:
    """Return the device's name and versions for a result. Ask only the driver, so that no CUDA context is created."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    device = platform.machine() if current_platform.is_cpu() else current_platform.get_device_name()
    return {"device": device, "vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}
