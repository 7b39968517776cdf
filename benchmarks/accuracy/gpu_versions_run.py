"""Child process of gpu_versions.py: send prompts twice to one engine, and list the functions that kvpilot replaced."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

from benchmarks.engine.gpu_engine_process import end_with_parent, say, versions


@dataclass(frozen=True)
class Job:
    """Engine, and the requests to send to it.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        prompts: prompts to send together.
        tokens: number of tokens to generate.
        out: file for the answers.
    """

    engine: dict[str, Any]
    prompts: list[list[int]]
    tokens: int
    out: str


def replaced() -> list[str]:
    """Return the dotted names of functions in vLLM's modules and classes that kvpilot has replaced by its own."""
    found = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm."):
            continue
        owners = [(name, module), *((f"{name}.{k}", v) for k, v in vars(module).items() if isinstance(v, type))]
        for path, owner in owners:
            if isinstance(owner, type) and owner.__module__ != name:
                continue
            for key, value in list(vars(owner).items()):
                function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if isinstance(function, FunctionType) and "kvpilot_runtime" in function.__code__.co_filename:
                    found.add(f"{path}.{key}")
    return sorted(found)


def main() -> NoReturn:
    """Run the job, write the answers, and exit without vLLM's shutdown."""
    end_with_parent()
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    from vllm import LLM, SamplingParams

    llm = LLM(**job.engine)
    say("started")
    asked = SamplingParams(temperature=0, max_tokens=job.tokens, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in job.prompts]
    rounds = [[list(one.outputs[0].token_ids) for one in llm.generate(prompts, asked)] for _ in range(2)]
    found = {"versions": versions(), "replaced": replaced(), "rounds": rounds}
    Path(job.out).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
