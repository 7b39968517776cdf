"""Child process of gpu_disaggregated.py: run one engine that prefills or decodes, and answer the parent's questions."""

import json
import os
import random
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from prometheus_client import generate_latest

from benchmarks.engine.gpu_engine_process import end_with_parent, say, versions


@dataclass(frozen=True)
class Job:
    """Work of the child process: the engine to run, and the parent to connect to.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        vocab: token IDs are drawn below this number.
        where: address of the parent's socket.
    """

    engine: dict[str, Any]
    vocab: int
    where: str


def block_sums(layers: dict[str, Any], num_blocks: int, blocks: Sequence[int]) -> list[int]:
    """Return a checksum of each block, over all layers with a KV cache.

    The checksum is the sum of the block's 8-byte words modulo 2^64, each multiplied by an odd number that depends on
    the word's position.
    """
    import torch

    caches = [layer.kv_cache for layer in layers.values() if getattr(layer, "kv_cache", None) is not None]
    total = torch.zeros(len(blocks), dtype=torch.int64)
    at = torch.tensor(list(blocks), dtype=torch.int64)
    for number, cache in enumerate(caches, 1):
        # If blocks are not contiguous, no view has one row per block, so copy them.
        held = cache.unflatten(0, (num_blocks, -1))[at.to(cache.device)].contiguous()
        words = held.view(torch.uint8).flatten(1).view(torch.int64)
        weights = torch.arange(1, words.shape[1] + 1, device=words.device, dtype=torch.int64) * 2 + 1
        total += number * (words * weights).sum(1).cpu()
    return [int(one) for one in total]


class Engine:
    """Engine that answers the parent's questions. A question is the name of a method and its arguments."""

    def __init__(self, job: Job) -> None:
        self.job, self.requests = job, 0

    def start(self) -> dict[str, Any]:
        """Create the engine, and return its capacity, cache layout and versions."""
        from vllm import LLM
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        began = time.perf_counter()
        self.llm = LLM(**self.job.engine).llm_engine
        self.core = self.llm.engine_core.engine_core
        self.config = self.core.scheduler.kv_cache_config
        worker = self.core.model_executor.driver_worker.worker
        self.layers = worker.vllm_config.compilation_config.static_forward_context
        self.worker = get_kv_transfer_group().connector_worker
        self.read: list[list[list[int]]] = []
        self.transfers: list[tuple[int, int, float]] = []
        pop, record = self.worker._pop_done_transfers, self.worker.xfer_stats.record_transfer

        def popped(transfers: Any) -> Any:
            done, failed = pop(transfers)
            for request in done - failed - self.worker._recv_failures:
                self.read.append(self.sums(self.worker._recving_metadata[request].local_block_ids))
            return done, failed

        def recorded(result: Any) -> None:
            self.transfers.append((result.totalBytes, result.descCount, result.xferDuration / 1e6))
            record(result)

        self.worker._pop_done_transfers, self.worker.xfer_stats.record_transfer = popped, recorded
        said = [x for x in generate_latest().decode().splitlines() if x.startswith("kvpilot_calibration_info")]
        start_s = time.perf_counter() - began
        say(f"started in {start_s:.0f} s {said}")
        layout = worker.vllm_config.cache_config.kv_cache_layout
        return {
            "start_s": start_s, "said": [*said, self.worker.compat_hash], "versions": versions(), "layout": layout,
            "regions": self.worker.num_regions,
        }  # fmt: skip

    def sums(self, blocks: Any) -> list[list[int]]:
        """Return the checksums of the blocks in `blocks`, which lists the block numbers of each KV-cache group."""
        return [block_sums(self.layers, self.config.num_blocks, group) for group in blocks]

    def serve(self, prompt: list[int], tokens: int, params: Any) -> dict[str, Any]:
        """Answer one random prompt, and return the answer and its figures.

        Args:
            prompt: length and number of the prompt. Both are the seed, so all engines get the same prompts. The prompt
                has one token more than this length, so that the tokens before it fill whole blocks.
            tokens: number of tokens of the answer.
            params: `kv_transfer_params` of the request, or None.
        """
        from vllm import SamplingParams

        rng = random.Random(str(prompt))  # noqa: S311  # the same load for all engines
        ids = [rng.randrange(3, self.job.vocab) for _ in range(prompt[0] + 1)]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )  # fmt: skip
        self.read.clear()
        self.transfers.clear()
        began, first, last = time.perf_counter(), 0.0, None
        self.llm.add_request(str(self.requests), {"prompt_token_ids": ids}, sampling)
        self.requests += 1
        while self.llm.has_unfinished_requests():
            for output in self.llm.step():
                first = first or time.perf_counter() - began
                last = output
        assert last is not None  # noqa: S101  # tells mypy that it is set
        return {
            "first_s": first, "answer": list(last.outputs[0].token_ids), "params": last.kv_transfer_params,
            "reads": len(self.transfers), "bytes": sum(size for size, _, _ in self.transfers),
            "copies": sum(copies for _, copies, _ in self.transfers),
            "transfer_s": sum(seconds for *_, seconds in self.transfers), "sums": self.read[0] if self.read else [],
        }  # fmt: skip

    def hear(self) -> None:
        """Run one engine step, in which vLLM learns which blocks the other engine has read, and frees them."""
        self.core.step()


def main() -> NoReturn:
    """Create the engine's process and answer the parent's questions until the parent closes the connection."""
    end_with_parent()
    engine = Engine(Job(**json.loads(Path(sys.argv[1]).read_text())))
    with socket.socket(socket.AF_UNIX) as asker:
        asker.connect(engine.job.where)
        for asked in asker.makefile("r"):
            what, more = json.loads(asked)
            found = getattr(engine, what)(**more)
            asker.sendall(json.dumps(found).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
