"""Start one engine of gpu_families.py or gpu_options.py in its own process, send requests to it, and shut it down."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.accuracy.gpu_equality_run import Job, answer, answered, sampling
from benchmarks.engine.gpu_engine_process import versions

SCHEMA: dict[str, Any] = {
    "type": "object", "additionalProperties": False, "required": ["city", "warm", "days"],
    "properties": {"city": {"enum": ["Ghent", "Oslo", "Porto"]}, "warm": {"type": "boolean"},
                   "days": {"type": "integer", "minimum": 1, "maximum": 9}},
}  # fmt: skip
SAMPLES = 4


@dataclass(frozen=True)
class Asked(Job):
    """Job of one engine, with additional settings.

    Attributes:
        env: additional environment variables.
        room: size of the cache, as a number of requests of the largest length. Further blocks are taken away, so that
            requests are preempted. 0 leaves the whole cache.
        how: kind of requests, a key of `HOW`.
        more: arguments for this kind of requests.
    """

    env: dict[str, str]
    room: float
    how: str = "answers"
    more: dict[str, Any] = field(default_factory=dict)


def start(asked: Asked) -> tuple[Any, dict[str, Any]]:
    """Start the engine, and reduce its cache to `room`.

    Return the engine and these facts: the sizes of its KV-cache groups, its free blocks and its mode of CUDA graphs.
    """
    from vllm import LLM

    llm = LLM(**asked.engine, disable_log_stats=False)
    core = llm.llm_engine.engine_core.engine_core
    config, pool = core.vllm_config, core.scheduler.kv_cache_manager.block_pool
    groups = [group.kv_cache_spec for group in core.scheduler.kv_cache_config.kv_cache_groups]
    longest = sum(-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in groups)
    if asked.room:
        pool.get_new_blocks(pool.get_num_free_blocks() - int(asked.room * longest))
    told = [{"kind": type(spec).__name__, "block": spec.block_size, "page_bytes": spec.page_size_bytes}
            for spec in groups]  # fmt: skip
    mode = config.compilation_config.cudagraph_mode
    return llm, {"groups": told, "free_blocks": pool.get_num_free_blocks(), "graphs": mode.name if mode else "NONE"}


def answers(asked: Asked) -> dict[str, Any]:
    """Send the requests of the job, and return the engine's greedy answers."""
    llm, facts = start(asked)
    return {**answered(llm, asked), **facts}


def adapted(asked: Asked) -> dict[str, Any]:
    """Return greedy answers with the adapter in `more["adapter"]`, in one batch with requests without an adapter."""
    from vllm.lora.request import LoRARequest

    llm, facts = start(asked)
    adapter, count = LoRARequest("adapter", 1, asked.more["adapter"]), len(asked.prompts)
    twice = Asked(**{**vars(asked), "prompts": asked.prompts * 2})
    found = answered(llm, twice, lora_request=[adapter] * count + [None] * count)
    return {**found, "answers": found["answers"][:count], "unadapted": found["answers"][count:], **facts}


def slept(asked: Asked) -> dict[str, Any]:
    """Return greedy answers three times: at first, in a repeat, and after sleep (level 1) and wake-up."""
    llm, facts = start(asked)
    first, again = answered(llm, asked), answered(llm, asked)
    llm.sleep(level=1)
    llm.wake_up()
    return {**first, **facts, "again": again["answers"], "woken": answered(llm, asked)["answers"]}


def details(asked: Asked) -> dict[str, Any]:
    """Return prompt logprobs, several samples of each prompt, and answers with and without a JSON schema."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm, facts = start(asked)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in asked.prompts]
    quiet: dict[str, Any] = {"use_tqdm": False}
    read = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), **quiet)
    drawn = llm.generate(prompts, SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=asked.tokens, logprobs=0,
                                                 ignore_eos=True, detokenize=False), **quiet)  # fmt: skip
    schema = StructuredOutputsParams(json=SCHEMA)
    held = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=schema), **quiet)
    free = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=200), **quiet)

    def text(one: Any) -> str:
        # Decode the answer alone. If a random prompt ends inside a UTF-8 character, vLLM's own text of the answer also
        # contains the end of the prompt.
        found: str = llm.get_tokenizer().decode(one.outputs[0].token_ids, skip_special_tokens=True)
        return found

    def own(tokens: Any, steps: Any) -> list[float]:
        return [step[token].logprob for token, step in zip(tokens, steps, strict=True)]

    return {
        **facts, "versions": versions(),
        "prompt_logprobs": [own(one.prompt_token_ids[1:], one.prompt_logprobs[1:]) for one in read],
        "samples": [[{"tokens": list(x.token_ids), "logprobs": own(x.token_ids, x.logprobs)} for x in one.outputs]
                    for one in drawn],
        "structured": [text(one) for one in held], "free": [text(one) for one in free],
    }  # fmt: skip


def data_parallel(asked: Asked) -> dict[str, Any]:
    """Return greedy answers of data-parallel engines that share the requests.

    vLLM starts the engines as processes and distributes the requests.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def all_of_them() -> list[dict[str, Any]]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**asked.engine))

        async def one(number: int, prompt: Any) -> dict[str, Any]:
            streamed = engine.generate({"prompt_token_ids": prompt}, sampling(asked), request_id=str(number))
            return answer([output async for output in streamed][-1])

        return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(asked.prompts)))

    return {"answers": asyncio.run(all_of_them()), "versions": versions()}


HOW: dict[str, Callable[[Asked], dict[str, Any]]] = {
    "answers": answers, "adapted": adapted, "slept": slept, "details": details, "data_parallel": data_parallel,
}  # fmt: skip
