"""A real vLLM in one process with a bounded cache. Pages that it frees are overwritten before the next step.

`python -m bounded_engine` reads the fields of `Asked` as a JSON object from stdin. It writes those of `Told` as
the last line of stdout.
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from kvpilot_smallmodels.stepping import in_steps
from support.own_process import ask


@dataclass
class Asked:
    """Requests to serve.

    Attributes:
        rounds: prompts by round; the prompts of a round are sent together.
        tokens: tokens of each answer.
        options: options of vLLM's LLM.
        retention: value of KVPILOT_RETENTION.
        poison: True overwrites freed pages and evicts them from the prefix cache. False leaves them until they are
            reused, as vLLM does.
        spoil_sinks: True overwrites the first page of every request, to show that the engine reads it.
    """

    model: str
    dtype: str
    retention: str
    rounds: list[list[list[int]]]
    tokens: list[list[int]]
    options: dict[str, Any]
    poison: bool = True
    spoil_sinks: bool = False


@dataclass
class Told:
    """Observations of the run.

    Attributes:
        answers: answers by round and prompt.
        cached: tokens from the prefix cache, by round and prompt.
        freed: pages that returned to the pool while their request ran.
        held: largest number of pages of one request.
        chunks: steps with several tokens of a request, without its first step.
        preempted: number of preemptions.
        blocks, tokens_of_cache: blocks of the pool, and its `kv_cache_size_tokens`.
        concurrency: number of requests of the longest context that the cache holds (`kv_cache_max_concurrency`).
        usage: largest use of the pool, 0 to 1.
        metrics: kvpilot's lines on /metrics.
    """

    answers: list[list[list[int]]] = field(default_factory=list)
    cached: list[list[int]] = field(default_factory=list)
    freed: int = 0
    held: int = 0
    chunks: int = 0
    preempted: int = 0
    blocks: int = 0
    tokens_of_cache: int = 0
    concurrency: float = 0.0
    usage: float = 0.0
    metrics: list[str] = field(default_factory=list)


def serve(asked: Asked) -> Told:
    """Run the requests in an engine in a separate process."""
    return Told(**ask("bounded_engine", asked, KVPILOT_CALIBRATION="off", KVPILOT_RETENTION=asked.retention))


class Watched:
    """Hooks into vLLM: before the executor's `execute_model`, and after the cache manager's `remove_skipped_blocks`."""

    def __init__(self, core: Any, asked: Asked, told: Told) -> None:
        self.told, self.asked = told, asked
        self.manager = core.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.pool = self.manager.block_pool
        layers = core.model_executor.vllm_config.compilation_config.static_forward_context.values()
        self.caches = [layer.kv_cache for layer in layers if getattr(layer, "kv_cache", None) is not None]
        self.freed: list[int] = []
        remove, execute = self.manager.remove_skipped_blocks, core.model_executor.execute_model

        def removing(request: str, *args: Any, **kwargs: Any) -> None:
            before = self.held(request)
            remove(request, *args, **kwargs)
            gone = before - self.held(request)
            told.freed += len(gone)
            if asked.poison:
                for block in (self.pool.blocks[i] for i in gone):
                    if block.ref_cnt == 0:  # no other request holds the block
                        self.pool._maybe_evict_cached_block(block)
                        self.freed.append(block.block_id)

        def executing(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            told.preempted += len(scheduled.preempted_req_ids or ())
            cached = scheduled.scheduled_cached_reqs
            told.chunks += sum(scheduled.num_scheduled_tokens[request] > 1 for request in cached.req_ids)
            told.held = max([told.held, *(len(self.held(request)) for request in scheduled.num_scheduled_tokens)])
            told.usage = max(told.usage, self.pool.get_usage())
            for block in self.freed:
                self.poison(block)
            self.freed.clear()
            if asked.spoil_sinks:
                for request in scheduled.num_scheduled_tokens:
                    self.poison(self.manager.req_to_blocks[request][0].block_id)
            return execute(scheduled, *args, **kwargs)

        self.manager.remove_skipped_blocks = removing
        core.model_executor.execute_model = executing

    def held(self, request: str) -> set[int]:
        """Return the ids of the KV pages that a request holds."""
        return {b.block_id for b in self.manager.req_to_blocks.get(request, ()) if not b.is_null}

    def poison(self, block: int) -> None:
        """Overwrite a KV page in all layers: quantized ones with the largest codes and NaN scales, others with 10,000.

        Elements are not NaN, because vLLM's own kernel multiplies values after a sequence's end by zero.
        """
        for cache in self.caches:
            cache[block].fill_(255 if cache.dtype == torch.uint8 else 1e4)


def main() -> None:
    """Serve the requests that stdin describes, and print the observations."""
    asked = Asked(**json.load(sys.stdin))
    from prometheus_client import generate_latest
    from vllm import LLM

    options = {"enforce_eager": True, "skip_tokenizer_init": True, **asked.options}
    llm = LLM(asked.model, kv_cache_dtype=asked.dtype, dtype="float32", **options)
    told, engine = Told(), llm.llm_engine
    core = engine.engine_core.engine_core
    told.metrics = [x for x in generate_latest().decode().splitlines() if x.startswith("kvpilot_")]
    config = core.model_executor.vllm_config.cache_config
    told.blocks = core.scheduler.kv_cache_config.num_blocks
    told.tokens_of_cache, told.concurrency = config.kv_cache_size_tokens, config.kv_cache_max_concurrency
    Watched(core, asked, told)

    number = 0
    for prompts, tokens in zip(asked.rounds, asked.tokens, strict=True):
        answers, cached = in_steps(engine, prompts, tokens, number)
        number += len(prompts)
        told.answers.append(answers)
        told.cached.append(cached)
    engine.engine_core.shutdown()
    print(json.dumps(asdict(told)), flush=True)


if __name__ == "__main__":
    main()
