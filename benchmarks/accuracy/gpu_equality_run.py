"""Child process of gpu_equality.py: answer the prompts of a job file greedily in one engine, with top-20 logprobs."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.engine.gpu_engine_process import end_with_parent, say, versions

TOP = 20
COUNTERS = ("vllm:num_preemptions", "vllm:prefix_cache_hits", "vllm:spec_decode_num_draft_tokens",
            "vllm:spec_decode_num_accepted_tokens")  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Engine, and the requests to send to it.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        prompts: token IDs of each prompt.
        tokens: number of tokens to generate after each prompt.
        at_once: True to send all prompts in one call, False to send one after another.
        out: file for the answers.
    """

    engine: dict[str, Any]
    prompts: list[list[int]]
    tokens: int
    at_once: bool
    out: str


def sampling(job: Job) -> Any:
    """Return vLLM's sampling parameters for the job: greedy, with the job's number of tokens, and top-20 logprobs."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=job.tokens, ignore_eos=True, detokenize=False, logprobs=TOP)


def answer(request: Any) -> dict[str, Any]:
    """Return the answer to a finished request: its tokens, and the most likely tokens of each step."""
    (done,) = request.outputs
    steps = [{str(token): entry.logprob for token, entry in top.items()} for top in done.logprobs]
    return {"tokens": list(done.token_ids), "logprobs": steps}


def answered(llm: Any, job: Job, **more: Any) -> dict[str, Any]:
    """Return an engine's answers to a job's prompts, with its counters, capacity and versions.

    `more` are additional arguments of vLLM's `generate`.
    """
    prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
    batches = [prompts] if job.at_once else [[prompt] for prompt in prompts]
    answers = [
        answer(request) for batch in batches for request in llm.generate(batch, sampling(job), use_tqdm=False, **more)
    ]
    counters = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS}
    capacity = llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
    return {"answers": answers, "counters": counters, "kv_tokens": capacity, "versions": versions()}


def main() -> NoReturn:
    """Run the engine of the job file that the command line names, and write its answers."""
    end_with_parent()
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    from vllm import LLM

    facts = answered(LLM(**job.engine, disable_log_stats=False), job)
    Path(job.out).write_text(json.dumps(facts))
    say(f"{len(facts['answers'])} answers, {facts['kv_tokens']:,} KV tokens, {facts['counters']}")
    # Exit at once, as gpu_engine_measure.py does. The parent kills the remaining processes of vLLM.
    os._exit(0)


if __name__ == "__main__":
    main()
