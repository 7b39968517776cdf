"""Child process of gpu_window.py: answer prompts greedily in one engine whose rings may be overwritten."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.accuracy.gpu_equality_run import COUNTERS, TOP
from benchmarks.engine.gpu_engine_process import end_with_parent, say, versions


@dataclass(frozen=True)
class Job:
    """Engine, and the requests to send to it.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        prompts: token IDs of each prompt.
        tokens: number of tokens to generate after each prompt.
        fill: content for a ring page when a request gets it: `zeros`, residuals of `others`, or "" for no change.
        out: file for the answers.
    """

    engine: dict[str, Any]
    prompts: list[list[int]]
    tokens: int
    fill: str
    out: str


class Rings:
    """Hook that runs before each step and overwrites the ring pages that requests get in this step."""

    def __init__(self, llm: Any, fill: str) -> None:
        core = llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        self.group = [type(g.kv_cache_spec).__name__ for g in groups].index("RingSpec")
        context = worker.vllm_config.compilation_config.static_forward_context
        layers = [layer for name, layer in context.items() if name.endswith(".recent")]
        self.caches, self.fill, self.pages = [layer.kv_cache for layer in layers], fill, 0
        impl = layers[0].owner.impl
        layout = impl.fmt.ring_layout(impl.head_size, groups[self.group].kv_cache_spec.block_size)
        self.regions = [
            (r.offset, r.offset + r.rows * r.row_bytes, 2 if r is layout.meta else r.row_bytes)
            for r in (layout.key_digits, layout.value_digits, layout.meta)
        ]
        self.tokens = layout.tokens
        self.owned: dict[str, list[int]] = {}
        execute = worker.execute_model

        def before(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.write(scheduled)
            return execute(scheduled, *args, **kwargs)

        worker.execute_model = before

    def write(self, scheduled: Any) -> None:
        """Overwrite each ring page that a request gets in this step."""
        for request in scheduled.finished_req_ids | (scheduled.preempted_req_ids or set()):
            self.owned.pop(request, None)
        cached = scheduled.scheduled_cached_reqs
        given = [(r.req_id, r.block_ids) for r in scheduled.scheduled_new_reqs]
        given += list(zip(cached.req_ids, cached.new_block_ids, strict=True))
        for request, blocks in given:
            for block in blocks[self.group] if blocks is not None else ():
                live = [b for own in self.owned.values() for b in own]
                self.pages += 1
                for cache in self.caches:
                    if self.fill == "others" and live:
                        self.copy(cache, live[self.pages % len(live)], block)
                    else:
                        cache[block].zero_()
                self.owned.setdefault(request, []).append(block)

    def copy(self, cache: Any, source: int, target: int) -> None:
        """Copy the residuals of one page into another one, each shifted by one token."""
        page = cache[source].flatten(1).clone()
        for begin, end, width in self.regions:
            if end > begin:
                part = page[:, begin:end]
                part.copy_(part.reshape(page.shape[0], -1, self.tokens, width).roll(1, 2).reshape(part.shape))
        cache[target].copy_(page.view(cache[target].shape))


def main() -> NoReturn:
    """Run the engine of the job file that the command line names, and write its answers."""
    end_with_parent()
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    from vllm import LLM, SamplingParams

    llm = LLM(**job.engine, disable_log_stats=False)
    rings = Rings(llm, job.fill) if job.fill else None
    params = SamplingParams(temperature=0.0, max_tokens=job.tokens, ignore_eos=True, detokenize=False, logprobs=TOP)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job.prompts], params, use_tqdm=False)
    answers = [
        {
            "tokens": list(done.token_ids),
            "logprobs": [{str(token): entry.logprob for token, entry in top.items()} for top in done.logprobs],
        }
        for request in outputs
        for done in request.outputs
    ]
    counters = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS}
    counters["ring_pages"] = rings.pages if rings else 0
    Path(job.out).write_text(json.dumps({"answers": answers, "counters": counters, "versions": versions()}))
    say(f"{len(answers)} answers, {counters}")
    os._exit(0)


if __name__ == "__main__":
    main()
