"""Child process of gpu_heavy.py: run one engine with heavy hitters, and overwrite pages that it has freed."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.engine.gpu_engine_process import end_with_parent, say, versions
from kvpilot_smallmodels.stepping import in_steps

FILLS = ("", "", "freed", "first")
"""Pages to overwrite in each turn: none, none, freed pages before the next step, the first page of every request."""


@dataclass(frozen=True)
class Job:
    """Engine, and the requests to send to it.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        rounds: prompts of each round. Those of a round are sent together.
        tokens: number of tokens to generate after each prompt.
        out: file for the turns.
    """

    engine: dict[str, Any]
    rounds: list[list[list[int]]]
    tokens: list[list[int]]
    out: str


@dataclass
class Turn:
    """Results of one turn.

    Attributes:
        answers: answers to the prompts of all rounds.
        steps: by request number, one list for each step, with these items:
            number of tokens before the step;
            number of new tokens;
            indices of the block table that have a page;
            attention masses of these pages, None if not measured;
            True if steps of a single token are measured;
            number of tokens whose results had arrived when the scheduler freed pages.
        freed: number of pages freed while their request ran.
        preempted: number of restarts.
        cached: number of tokens found in the prefix cache.
        left: number of pages that are not free at the end.
    """

    answers: list[list[int]] = field(default_factory=list)
    steps: dict[str, list[list[Any]]] = field(default_factory=dict)
    freed: int = 0
    preempted: int = 0
    cached: int = 0
    left: int = 0


def name_of(request: str) -> str:
    """Return a request's own name, without the suffix that vLLM adds."""
    return request.partition("-")[0]


class Watched:
    """Recorder of the messages between the scheduler and its workers."""

    def __init__(self, core: Any) -> None:
        from kvpilot_runtime.bounded.heavy_spec import KEPT, MASSES

        self.told = KEPT
        self.fill, self.turn, self.freed = "", Turn(), list[int]()
        self.sent: dict[int, dict[str, list[Any]]] = {}  # steps whose results have not arrived yet
        self.processed: dict[str, int] = {}  # number of tokens whose results had arrived when pages were freed
        scheduler, executor = core.scheduler, core.model_executor
        self.manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.pool = self.manager.block_pool
        layers = executor.vllm_config.compilation_config.static_forward_context.values()
        self.caches = [layer.kv_cache for layer in layers if getattr(layer, "kv_cache", None) is not None]
        remove, execute = self.manager.remove_skipped_blocks, executor.execute_model
        update = scheduler.update_from_output

        def removing(request: str, *args: Any, **kwargs: Any) -> None:
            before = set(self.held(request).values())
            remove(request, *args, **kwargs)
            self.processed[request] = args[0]
            gone = before - set(self.held(request).values())
            self.turn.freed += len(gone)
            for block in (self.pool.blocks[i] for i in gone):
                if block.ref_cnt == 0:  # leave shared pages, because a later request would hit them only in some turns
                    self.pool._maybe_evict_cached_block(block)
                    self.freed.append(block.block_id)

        def executing(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.before_step(scheduled)
            return execute(scheduled, *args, **kwargs)

        def updating(scheduled: Any, output: Any) -> Any:
            steps = self.sent.pop(id(scheduled))
            for request, pages, masses in getattr(output, MASSES, ()):
                step = steps[request]
                if list(pages) != step[2]:
                    raise RuntimeError(f"request {request} was weighed by pages {pages}, and holds {step[2]}")
                step[3] = masses
            return update(scheduled, output)

        self.manager.remove_skipped_blocks = removing
        executor.execute_model, scheduler.update_from_output = executing, updating

    def held(self, request: str) -> dict[int, int]:
        """Return a request's blocks by their index in its block table."""
        blocks = enumerate(self.manager.req_to_blocks.get(request, ()))
        return {place: block.block_id for place, block in blocks if not block.is_null}

    def before_step(self, scheduled: Any) -> None:
        """Record the step, and overwrite the pages that the present turn should overwrite."""
        self.turn.preempted += len(scheduled.preempted_req_ids or ())
        cached = scheduled.scheduled_cached_reqs
        before = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        steps = self.sent[id(scheduled)] = {}
        for request, new in scheduled.num_scheduled_tokens.items():
            known = self.processed.get(request, before[request])
            step = [before[request], new, list(self.held(request)), None, getattr(scheduled, self.told)[1], known]
            self.turn.steps.setdefault(name_of(request), []).append(step)
            steps[request] = step
        if self.fill == "freed":
            self.overwrite(self.freed)
        if self.fill == "first":
            self.overwrite([self.held(request)[0] for request in scheduled.num_scheduled_tokens])
        self.freed.clear()

    def overwrite(self, blocks: Sequence[int]) -> None:
        """Fill quantized pages with the largest codes and NaN scales, and 16-bit pages with large numbers.

        16-bit pages get no NaN, because FlashAttention multiplies values after a sequence's end by zero.
        """
        for cache in self.caches:
            for block in blocks:
                cache[block].fill_(255 if cache.element_size() == 1 else 1e4)


def ask(llm: Any, job: Job, watched: Watched, fill: str) -> Turn:
    """Run one turn: empty the prefix cache, and send all rounds. `fill` is one of `FILLS`."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be emptied: pages are in use")
    engine, turn, number = llm.llm_engine, Turn(), 0
    watched.fill, watched.turn = fill, turn
    watched.manager.steps = 0  # restart the count, so that every turn measures the same steps
    for prompts, counts in zip(job.rounds, job.tokens, strict=True):
        answers, cached = in_steps(engine, prompts, counts, number)
        number += len(prompts)
        turn.answers += answers
        turn.cached += sum(cached)
    turn.left = len(watched.pool.blocks) - 1 - watched.pool.get_num_free_blocks()
    return turn


def main() -> NoReturn:
    """Run the engine of the job file that the command line names, and write its turns."""
    end_with_parent()
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    from vllm import LLM

    llm = LLM(**job.engine)
    core = llm.llm_engine.engine_core.engine_core
    watched = Watched(core)
    runner = core.model_executor.driver_worker.worker.model_runner
    turns = []
    for fill in FILLS:
        turns.append(ask(llm, job, watched, fill))
        say(f"{fill or 'left'}: {turns[-1].freed} pages freed, {turns[-1].preempted} preempted, {turns[-1].left} left")
    mode = str(core.model_executor.vllm_config.compilation_config.cudagraph_mode)
    said = {"versions": versions(), "runner": type(runner).__module__, "graphs": mode}
    Path(job.out).write_text(json.dumps({**said, "turns": [asdict(turn) for turn in turns]}))
    os._exit(0)


if __name__ == "__main__":
    main()
