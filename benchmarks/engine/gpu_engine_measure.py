"""Child process of gpu_engine.py: start one engine, measure the cases of a job file, and save after each case.

Cases share their prompts: a shorter context is a prefix of a longer one. So the engine prefills each prompt only once,
in the case with the longest context. Prefill rates count only prompts that were not in the prefix cache.
"""

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.engine.gpu_beside import beside_case
from benchmarks.engine.gpu_engine_driver import FIRST_TOKEN, WARM_STEPS, DriveError, Driver, Filled, prompt
from benchmarks.engine.gpu_engine_process import end_with_parent, say, versions

PROMPTS_AT_ONCE = 8
"""Number of prompts in one timed prefill. A case with more prompts is measured in several prefills."""
SHORT, SHORTS = 512, 7
"""Short prompts of a mixed prefill: tokens in each half of a prompt (one half is cached), and number of prompts."""


@dataclass(frozen=True)
class Job:
    """Engine, and the measurements to make.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        cases: (number of sequences, context tokens) of each decode measurement.
        chunked: tokens of a prompt whose first half is cached and whose second half is prefilled; 0 to skip this case.
        mixed: True to also measure a step that prefills the end of a long prompt and several short prompts.
        steps, repeats: decode steps in one timing, and timings per case.
        vocab: token IDs are drawn below this number.
        drafts: random draft tokens per sequence and step, almost all of which are rejected. So a step computes 1 +
            `drafts` tokens of each sequence, and yields one token. 0 turns speculation off.
        out: file for the result.
        beside: for each measurement, new tokens of a request that arrives while other sequences decode.
    """

    engine: dict[str, Any]
    cases: list[tuple[int, int]]
    chunked: int
    steps: int
    repeats: int
    vocab: int
    drafts: int
    out: str
    mixed: bool = False
    beside: list[int] = field(default_factory=list)


class Result:
    """JSON file with the results of one engine. It is saved after each case, so at most one case can be lost."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.data: dict[str, Any] = {"cases": {}}

    def save(self, **facts: Any) -> None:
        """Add results, and write the whole file again."""
        self.data.update(facts)
        scratch = self._path.with_suffix(".part")
        scratch.write_text(json.dumps(self.data, indent=1))
        scratch.replace(self._path)


def decode_case(driver: Driver, job: Job, batch: int, context: int) -> dict[str, Any]:
    """Prefill the prompts of a case, then measure decode steps over them."""
    prompts = [prompt(str(i), context, job.vocab) for i in range(batch)]
    groups = [prompts[i : i + PROMPTS_AT_ONCE] for i in range(0, batch, PROMPTS_AT_ONCE)]
    filled = [driver.prefill(group) for group in groups]
    runs = [driver.decode(prompts, job.steps) for _ in range(job.repeats)]
    means = [1e3 * statistics.fmean(run) for run in runs]
    every = sorted(1e3 * seconds for run in runs for seconds in run)
    return {
        "batch": batch,
        "context": context,
        "step_ms": statistics.median(means),
        "step_ms_of_repeats": means,
        "median_ms": statistics.median(every),
        "p90_ms": every[int(0.9 * (len(every) - 1))],
        "steps": len(every),
        "prefill": prefill_facts(filled),
    }


def prefill_facts(filled: list[Filled]) -> dict[str, Any]:
    """Return the median tokens per second of the prefills without cached tokens, or None if there is none."""
    rates = [group.tokens / group.seconds for group in filled if group.cached == 0]
    return {"tokens_per_s": statistics.median(rates) if rates else None, "groups": [asdict(g) for g in filled]}


def chunked_case(driver: Driver, job: Job) -> dict[str, Any]:
    """Measure the time to first token of `repeats` long prompts whose first half is cached."""
    fills = []
    for repeat in range(job.repeats):
        tokens = prompt(f"chunked/{repeat}", job.chunked, job.vocab)
        driver.prefill([tokens[: job.chunked // 2]])
        fills.append(driver.prefill([tokens]))
    return first_tokens(job, fills)


def first_tokens(job: Job, fills: list[Filled]) -> dict[str, Any]:
    """Return the time until all prompts of a prefill have their first token, as median and for each repeat."""
    return {
        "tokens": job.chunked,
        "ttft_s": statistics.median(fill.seconds for fill in fills),
        "repeats": [asdict(fill) for fill in fills],
    }


def mixed_case(driver: Driver, job: Job, step: int) -> dict[str, Any]:
    """Measure an engine step that prefills the end of a long prompt and short prompts, `step` new tokens together.

    The beginnings of all these prompts are in the prefix cache.
    """
    if not SHORTS * SHORT < step < job.chunked:
        raise DriveError(f"steps of {step:,} new tokens: give more than {SHORTS * SHORT:,}, and fewer than --chunked")
    fills = []
    for repeat in range(job.repeats):
        short = [prompt(f"short/{repeat}/{i}", 2 * SHORT, job.vocab) for i in range(SHORTS)]
        long = prompt(f"mixed/{repeat}", job.chunked, job.vocab)
        driver.prefill([long[: SHORTS * SHORT - step]])
        driver.prefill([tokens[:SHORT] for tokens in short])
        fills.append(driver.prefill([*short, long]))
    return first_tokens(job, fills)


def warm_up(driver: Driver, job: Job) -> None:
    """Run each kind of engine step once, so that no measurement includes the compilation of a kernel."""
    longest = min(16384, max(context for _, context in job.cases), driver.max_model_len // 4)
    tokens = prompt("warm", 2 * longest, job.vocab)
    driver.prefill([tokens[:longest]])
    driver.prefill([tokens])
    driver.decode([prompt(f"warm/{i}", 16, job.vocab) for i in range(2)], 8)


def attempt(what: str, capacity: int, needed: int, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one case, or the error that prevented them.

    Args:
        what: name of the case.
        capacity: tokens of the KV cache.
        needed: tokens that the case needs. If they do not fit in the KV cache, return an error.
        measure: function that measures the case.
    """
    if needed > capacity:
        return {"error": f"needs {needed:,} tokens of KV cache, there are {capacity:,}"}
    began = time.perf_counter()
    try:
        facts = measure()
    except Exception as error:  # The error is the result of this case. The other cases still run.
        facts = {"error": f"{type(error).__name__}: {error}"}
    shown = facts.get("error") or f"{facts.get('step_ms', facts.get('ttft_s')):.3f}"
    say(f"{what}: {shown} ({time.perf_counter() - began:.1f} s)")
    return facts


def draft_at_random(drafts: int, vocab: int) -> None:
    """Make vLLM's n-gram proposers draft `drafts` random tokens for each sequence.

    vLLM 0.32 has two classes of such proposers: one for each of its model runners.
    """
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    rng = random.Random(3)  # noqa: S311

    def propose(_self: Any, _num: int, sampled: list[list[int]], *_rest: Any, **_more: Any) -> list[list[int]]:
        return [rng.choices(range(FIRST_TOKEN, vocab), k=drafts) if tokens else [] for tokens in sampled]

    NgramProposer.propose = propose
    with suppress(ImportError):
        from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

        def propose_on_gpu(self: Any, input_batch: Any, *_rest: Any, **_more: Any) -> Any:
            return self.drafts[: input_batch.num_reqs].random_(FIRST_TOKEN, vocab)

        NgramGPUSpeculator.propose = propose_on_gpu


def main() -> NoReturn:
    """Run the job of the file that the command line names."""
    end_with_parent()
    fields = json.loads(Path(sys.argv[1]).read_text())
    job = Job(**{**fields, "cases": [(batch, context) for batch, context in fields["cases"]]})
    result = Result(Path(job.out))
    from vllm import LLM

    began = time.perf_counter()
    llm = LLM(**job.engine)
    if job.drafts:
        draft_at_random(job.drafts, job.vocab)
    config = llm.llm_engine.vllm_config
    capacity = int(config.cache_config.kv_cache_size_tokens)
    result.save(
        versions=versions(),
        start_s=time.perf_counter() - began,
        kv_tokens=capacity,
        num_gpu_blocks=config.cache_config.num_gpu_blocks,
        block_size=config.cache_config.block_size,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
    )
    say(f"started in {result.data['start_s']:.0f} s, {capacity:,} KV tokens")
    driver = Driver(llm.llm_engine, config.model_config.max_model_len)
    warm_up(driver, job)
    batches = list(dict.fromkeys(batch for batch, _ in job.cases))
    for batch, context in sorted(job.cases, key=lambda case: (batches.index(case[0]), -case[1])):
        needed = batch * (context + job.steps + 2 * WARM_STEPS)
        measure = partial(decode_case, driver, job, batch, context)
        name = f"{batch}x{context}"
        result.data["cases"][name] = attempt(name, capacity, needed, measure)
        result.save()
    if job.chunked:
        needed = job.chunked + config.cache_config.block_size
        result.save(chunked=attempt(f"chunked {job.chunked}", capacity, needed, partial(chunked_case, driver, job)))
    if job.chunked and job.mixed:
        step = config.scheduler_config.max_num_batched_tokens
        needed = job.chunked + SHORTS * 2 * SHORT + config.cache_config.block_size
        result.save(mixed=attempt(f"mixed {job.chunked}", capacity, needed, partial(mixed_case, driver, job, step)))
    for new in job.beside:
        found = attempt(f"{new} new beside", capacity, 0, partial(beside_case, driver, job.vocab, new))
        result.save(beside=[*result.data.get("beside", []), found])
    sys.stdout.flush()
    # Skip vLLM's shutdown, which takes seconds of GPU time. The parent kills the processes anyway.
    os._exit(0)


if __name__ == "__main__":
    main()
