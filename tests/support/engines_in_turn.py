"""Real vLLM engines on a CPU, one after another in one process that imports vLLM only once, and their answers.

`python -m support.engines_in_turn` reads a JSON list of `Turn`s from stdin. It writes a list of `Answered` as the last
line of stdout.
"""

import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from support.own_process import ask, run

_PLAIN = {"KVPILOT_CALIBRATION": "off", "KVPILOT_RECENT_TOKENS": "0"}


@dataclass
class Turn:
    """One engine and its requests. The prompts of one round are sent together.

    `tokens` are the answer lengths by round and prompt. `options` go to vLLM's LLM.
    """

    model: str
    dtype: str
    rounds: list[list[list[int]]]
    tokens: list[list[int]]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answered:
    """Results of one `Turn`.

    Attributes:
        answers: answers by round and prompt.
        cached: tokens from the prefix cache, by round and prompt.
        preempted: number of preemptions.
        groups: KV-cache groups: spec class, tokens of a block, and bytes of a page without and with padding.
        capacity: `kv_cache_size_tokens`, the number of tokens that fit in the cache.
    """

    answers: list[list[list[int]]]
    cached: list[list[int]]
    preempted: int
    groups: list[tuple[str, int, int, int]]
    capacity: int


def serve(turns: Sequence[Turn], env: Mapping[str, str] | None = None) -> list[Answered]:
    """Run the engines in a separate process. Prefills read quantized pages, and calibration is off."""
    asked = [asdict(turn) for turn in turns]
    return [Answered(**found) for found in ask("support.engines_in_turn", asked, **{**_PLAIN, **(env or {})})]


def refused(model: Path, env: Mapping[str, str] | None = None, dtype: str = "k4v4", **options: Any) -> str:
    """Return the output of an engine that fails to start with these options. The preflight does not run."""
    small = {"load_format": "dummy", "kv_cache_memory_bytes": 16 << 20, "max_model_len": 256}
    turn = Turn(str(model), dtype, [], [], {**small, **options})
    code, out, err = run("support.engines_in_turn", [asdict(turn)], **{**_PLAIN, **(env or {})})
    if code == 0:
        raise RuntimeError("vLLM started, although it should refuse these options")
    return out + err


def answer(turn: Turn) -> Answered:
    """Start one engine, send its requests, shut it down, and return its answers."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import destroy_model_parallel
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = 0
    stock = Scheduler._preempt_request

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return stock(self, *args, **kwargs)

    Scheduler._preempt_request = counted
    options = {"enforce_eager": True, "skip_tokenizer_init": True, **turn.options}
    llm = LLM(turn.model, kv_cache_dtype=turn.dtype, **options)
    core = llm.llm_engine.engine_core.engine_core
    groups = [group.kv_cache_spec for group in core.scheduler.kv_cache_config.kv_cache_groups]
    answers, cached = [], []
    for prompts, tokens in zip(turn.rounds, turn.tokens, strict=True):
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in tokens]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        answers.append([list(o.outputs[0].token_ids) for o in outputs])
        cached.append([o.num_cached_tokens or 0 for o in outputs])
    Scheduler._preempt_request = stock
    capacity = core.model_executor.vllm_config.cache_config.kv_cache_size_tokens
    found = [(type(spec).__name__, spec.block_size, *used(spec)) for spec in groups]
    llm.llm_engine.engine_core.shutdown()
    del llm, core
    gc.collect()
    destroy_model_parallel()  # the next engine creates the process groups again: MoE models need more of them
    return Answered(answers, cached, preempted, found, capacity)


def used(spec: Any) -> tuple[int, int]:
    """Return the bytes of one page of a KV-cache group, without and with padding."""
    from dataclasses import replace

    return replace(spec, page_size_padded=None).page_size_bytes, spec.page_size_bytes


def main() -> None:
    """Run the engines that stdin describes, and print their answers."""
    turns = [Turn(**asked) for asked in json.load(sys.stdin)]
    print(json.dumps([asdict(answer(turn)) for turn in turns]), flush=True)


if __name__ == "__main__":
    main()
