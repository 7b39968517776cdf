"""Child process of gpu_offload.py: continue conversations in random order in one engine, and report hits by tier."""

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from prometheus_client import REGISTRY

from benchmarks.engine.gpu_engine_process import end_with_parent, say, versions


@dataclass(frozen=True)
class Job:
    """Work of the child process: the engine to run, and its load.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        vocab: token IDs are drawn below this number.
        conversations: number of conversations.
        history, turn, answer: tokens of a conversation's history, of a request, and of its answer.
        requests: number of measured requests. Before them, each conversation has one request that is not measured.
        at_once: number of requests in flight.
        check: True to compare the bytes of loaded blocks with those that were stored.
        out: file for the result.
    """

    engine: dict[str, Any]
    vocab: int
    conversations: int
    history: int
    turn: int
    answer: int
    requests: int
    at_once: int
    check: bool
    out: str


class Checked:
    """Comparison of loaded blocks with stored ones, by checksums of every block in every layer."""

    def __init__(self, llm: Any) -> None:
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from kvpilot_runtime.transfer.host_copies import rows

        connector = get_kv_transfer_group().connector_worker
        core = llm.llm_engine.engine_core.engine_core
        config = core.scheduler.kv_cache_config
        layers = core.model_executor.driver_worker.worker.vllm_config.compilation_config.static_forward_context
        groups = [config.kv_cache_groups[group.group_id].layer_names for group in connector.spec.config.groups]
        worker, per_chunk = connector.worker, connector.spec.blocks_per_chunk
        store, load = worker.submit_store, worker.submit_load
        self.compared = self.changed = 0
        kept: dict[tuple[int, int], Any] = {}
        weights: dict[int, Any] = {}

        def sums(group: int, blocks: Any) -> Any:
            """Return checksums, int64 [blocks, layers].

            A checksum is the sum of a block's 8-byte words modulo 2^64, each multiplied by a random odd number that
            depends on the word's position.
            """
            found = []
            for name in groups[group]:
                cache = layers[name].kv_cache
                held = cache.unflatten(0, (config.num_blocks, -1))[blocks.to(cache.device)].contiguous()
                pages = held.view(torch.uint8).flatten(1).view(torch.int64)
                size = pages.shape[1]
                if size not in weights:
                    drawn = torch.randint(1, 2**62, (size,), generator=torch.Generator().manual_seed(0))
                    weights[size] = drawn.to(cache.device) * 2 + 1
                found.append((pages * weights[size]).sum(1))
            return torch.stack(found, 1).cpu()

        def submit_store(job: int, source: Any, target: Any) -> bool:
            for group, (blocks, places) in enumerate(rows(source, target, per_chunk)):
                kept.update({(group, p): s for p, s in zip(places.tolist(), sums(group, blocks), strict=True)})
            return bool(store(job, source, target))

        def submit_load(job: int, source: Any, target: Any, *more: Any) -> bool:
            done = bool(load(job, source, target, *more))
            worker.wait({job})
            for group, (blocks, places) in enumerate(rows(target, source, per_chunk)):
                for place, found in zip(places.tolist(), sums(group, blocks), strict=True):
                    self.compared += 1
                    self.changed += not torch.equal(kept[group, place], found)
            return done

        worker.submit_store, worker.submit_load = submit_store, submit_load


def main() -> NoReturn:
    """Run the engine of the job file that the command line names, and write its result."""
    end_with_parent()
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    from vllm import LLM

    began = time.perf_counter()
    llm = LLM(**job.engine, disable_log_stats=False)
    start_s = time.perf_counter() - began
    checked = Checked(llm) if job.check else None
    rng = random.Random(1)  # noqa: S311  # the same load for all engines
    histories = [[rng.randrange(3, job.vocab) for _ in range(job.history)] for _ in range(job.conversations)]
    asked = list(range(job.conversations))
    rng.shuffle(asked)
    say(f"started in {start_s:.0f} s; {job.conversations} conversations of {job.history} tokens")
    serve(llm, job, [turn(histories[i], job, rng) for i in asked])
    before = counters()
    prompts = [turn(histories[rng.randrange(job.conversations)], job, rng) for _ in range(job.requests)]
    began = time.perf_counter()
    firsts = serve(llm, job, prompts)
    seconds = time.perf_counter() - began
    after = counters()
    grown = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after}
    result = {
        "requests_per_s": job.requests / seconds, "seconds": seconds, "start_s": start_s,
        "ttft_ms": [1e3 * x for x in (statistics.median(firsts), statistics.quantiles(firsts, n=20)[-1])],
        "queried": sum(map(len, prompts)), "gpu_hits": grown.get("vllm:prefix_cache_hits", 0.0),
        "host_hits": grown.get("vllm:external_prefix_cache_hits", 0.0),
        "load_gib": grown.get("vllm:kv_offload_load_bytes", 0.0) / 2**30,
        "load_s": grown.get("vllm:kv_offload_load_time", 0.0),
        "store_gib": grown.get("vllm:kv_offload_store_bytes", 0.0) / 2**30,
        "store_s": grown.get("vllm:kv_offload_store_time", 0.0),
        "preemptions": grown.get("vllm:num_preemptions", 0.0),
        "checked": job.check, "compared": checked.compared if checked else 0,
        "changed": checked.changed if checked else 0, "versions": versions(),
    }  # fmt: skip
    Path(job.out).write_text(json.dumps(result))
    say(f"{job.requests} requests in {seconds:.1f} s")
    os._exit(0)


def turn(history: list[int], job: Job, rng: random.Random) -> list[int]:
    """Return a request's prompt: the conversation's history, and new tokens that no later request repeats."""
    return history + [rng.randrange(3, job.vocab) for _ in range(job.turn)]


def serve(llm: Any, job: Job, prompts: Sequence[list[int]]) -> list[float]:
    """Send requests in order, `at_once` in flight. Return the seconds from each arrival to the first token."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=job.answer, ignore_eos=True, detokenize=False)
    engine, waiting = llm.llm_engine, list(enumerate(prompts))[::-1]
    arrived: dict[str, float] = {}
    first: dict[str, float] = {}
    in_flight = 0
    while waiting or in_flight:
        while waiting and in_flight < job.at_once:
            number, prompt = waiting.pop()
            name = f"{len(prompts)}-{number}"
            arrived[name] = time.perf_counter()
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
            in_flight += 1
        for output in engine.step():
            if output.outputs and output.outputs[0].token_ids:
                first.setdefault(output.request_id, time.perf_counter())
            in_flight -= output.finished
    return [first[name] - arrived[name] for name in arrived]


def counters() -> dict[str, float]:
    """Return vLLM's counters by name, each summed over its series.

    Read the Prometheus registry, because `LLM.get_metrics` truncates seconds to integers.
    """
    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name == f"{family.name}_total":
                found[family.name] = found.get(family.name, 0.0) + sample.value
    return found


if __name__ == "__main__":
    main()
