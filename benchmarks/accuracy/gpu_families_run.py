"""Child process of gpu_families.py and gpu_options.py: run several engines at the same time on one GPU.

Each engine has its own process and its own log. The process is forked from a process that has only imported vLLM. If an
engine fails, its file contains the error instead of answers.
"""

import json
import multiprocessing
import os
import re
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.accuracy.gpu_families_ask import HOW, Asked
from benchmarks.engine.gpu_engine_process import attention_lines, end_with_parent, error_lines, say


def serve(asked: Asked) -> NoReturn:
    """Start one engine, write its answers and its log into one folder, and exit."""
    os.environ.update(asked.env)
    out = Path(asked.out)
    log = out.with_suffix(".log")
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        inspect_here()
        found = HOW[asked.how](asked)
        said = re.findall(r"(?:Calibration: source|Recent window|Sleep mode freed)[^\n\x1b]*", log.read_text())
        found |= {"said": list(dict.fromkeys(line.strip() for line in said)), "attention": attention_lines(log)}
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    sys.stdout.flush()
    out.write_text(json.dumps(found))
    os._exit(0)  # Skip vLLM's own shutdown, as gpu_engine_measure.py does.


def inspect_here() -> None:
    """Let vLLM inspect a model's class in this process.

    Otherwise vLLM would start another process for it, which would import everything again.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def run(context: Any, limit: float, asked: Asked) -> None:
    """Run an engine in its own process. Kill it after its time limit."""
    name, out = Path(asked.out).stem, Path(asked.out)
    process = context.Process(target=serve, args=(asked,))
    process.start()
    process.join(limit)
    if process.exitcode is None:
        process.kill()
        process.join()
    if not out.exists():
        log = out.with_suffix(".log")
        errors = error_lines(log) if log.exists() else []
        what = f"still running after {limit:.0f} s" if process.exitcode == -9 else f"ended with {process.exitcode}"
        out.write_text(json.dumps({"error": "; ".join([what, *errors])}))
    found = json.loads(out.read_text())
    say(f"{name}: {found.get('error') or found.get('counters') or 'done'}")


def start_cuda() -> None:
    """Start CUDA. This fails if the parent process had started CUDA before it forked this process."""
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")


def processes() -> Any:
    """Return the context for new processes: fork them after the import of vLLM, unless that import starts CUDA."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.entrypoints.llm"])
    tried = context.Process(target=start_cuda)
    tried.start()
    tried.join()
    say("vLLM is imported" if tried.exitcode == 0 else "vLLM's import starts CUDA: every engine imports it anew")
    return context if tried.exitcode == 0 else multiprocessing.get_context("spawn")


def main() -> None:
    """Run all engines of the job file, `at_once` at the same time and each for at most `limit` seconds."""
    end_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text())
    context = processes()
    with ThreadPoolExecutor(job["at_once"]) as pool:
        started = [pool.submit(run, context, job["limit"], Asked(**engine)) for engine in job["engines"]]
    for one in started:
        one.result()


if __name__ == "__main__":
    main()
