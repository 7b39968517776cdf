"""Child process of gpu_lmcache.py: one engine with LMCache answers prompts one by one, and reports on their blocks."""

import inspect
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.engine.gpu_disaggregated_run import block_sums
from benchmarks.engine.gpu_engine_process import end_with_parent, say, versions
from benchmarks.engine.gpu_offload_run import counters


@dataclass(frozen=True)
class Job:
    """Work of the child process: the engine to run, and the prompts to send.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        vocab: token IDs are drawn below this number.
        prompts, tokens, answer: number of prompts, tokens of each (plus one), and tokens of an answer.
        wait: largest time in seconds until stored blocks are in LMCache.
        out: file for the result.
    """

    engine: dict[str, Any]
    vocab: int
    prompts: int
    tokens: int
    answer: int
    wait: float
    out: str


class Moves:
    """Recorder of transfers to and from LMCache since the last `take`, with their seconds and bytes."""

    def __init__(self, block: int) -> None:
        from lmcache.v1.platform import resolve_device_ops
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        adapter = get_kv_transfer_group().worker_adapter
        self.block, self.name = block, adapter.model_name
        self.stores: list[tuple[Any, int, list[int]]] = []
        self.loads: list[tuple[Any, int, list[int]]] = []
        self.found = dict.fromkeys(("load_s", "read_s", "read_bytes", "write_s", "write_bytes"), 0.0)
        context = adapter.transfer_ctx
        device = next(iter(adapter.kv_caches.values())).device.type
        copy = resolve_device_ops(device).multi_layer_block_kv_transfer
        # LMCache copies by torch if its compiled kernels do not fit the installed torch, so record which way it uses.
        self.how = f"{type(context).__name__}, copies by {'torch' if inspect.ismethod(copy) else 'its kernels'}"
        store, retrieve, message = context.submit_store, context.submit_retrieve, context.engine_driven_context
        prepare, commit = message.prepare_retrieve, message.commit_store

        def stored(request: str, key: Any, caches: Any, blocks: Any, *more: Any) -> Any:
            done = store(request, key, caches, blocks, *more)
            self.stores.append((done, key.start // block, list(blocks[0])))
            return done

        def loaded(request: str, key: Any, caches: Any, blocks: Any, *more: Any, skip_first_n_tokens: int = 0) -> Any:
            began = time.perf_counter()
            done = retrieve(request, key, caches, blocks, *more, skip_first_n_tokens=skip_first_n_tokens)
            self.found["load_s"] += time.perf_counter() - began
            skipped = skip_first_n_tokens // block
            self.loads.append((done, key.start // block + skipped, list(blocks[0][skipped:])))
            return done

        def read(*args: Any) -> Any:
            began = time.perf_counter()
            chunks = prepare(*args)
            self.found["read_s"] += time.perf_counter() - began
            self.found["read_bytes"] += sum(chunk.nbytes for chunk in chunks or ())
            return chunks

        def written(key: Any, instance: int, chunks: Any) -> bool:  # On a GPU, LMCache calls this from its own thread.
            began = time.perf_counter()
            done = bool(commit(key, instance, chunks))
            self.found["write_s"] += time.perf_counter() - began
            self.found["write_bytes"] += sum(chunk.nbytes for chunk in chunks)
            return done

        context.submit_store, context.submit_retrieve = stored, loaded
        message.prepare_retrieve, message.commit_store = read, written

    def take(self, wait: float) -> dict[str, Any]:
        """Wait at most `wait` seconds for each transfer. Return the figures since the last call.

        `stored` and `loaded` map the index of a block in the prompt to its block number.
        """
        taken: dict[str, Any] = {"stored": {}, "loaded": {}, "failed": 0}
        for what, moves in (("stored", self.stores), ("loaded", self.loads)):
            for done, first, blocks in moves:
                if done.result(wait):
                    taken[what].update(enumerate(blocks, first))
                else:
                    taken["failed"] += len(blocks)
            moves.clear()
        taken |= self.found
        self.found.update(dict.fromkeys(self.found, 0.0))
        return taken


class Engine:
    """Engine of a job, with a recorder of its transfers to and from LMCache."""

    def __init__(self, job: Job) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            # vLLM 0.32 on a CPU searches every module for kernels, and crashes on a module of numba, which LMCache
            # imports: an object of llvmlite there has no `__dict__`. So give that object one.
            import llvmlite.binding.ffi

            llvmlite.binding.ffi.lib._fntab["__dict__"] = {}
        began = time.perf_counter()
        self.job = job
        self.llm = LLM(**job.engine, disable_log_stats=False).llm_engine
        self.start_s = time.perf_counter() - began
        core = self.llm.engine_core.engine_core
        self.blocks = core.scheduler.kv_cache_config.num_blocks
        self.layers = core.model_executor.driver_worker.worker.vllm_config.compilation_config.static_forward_context
        self.moves = Moves(job.engine["block_size"])

    def serve(self, number: int) -> dict[str, Any]:
        """Answer one random prompt, whose number is the seed. Return its figures and the checksums of its blocks.

        The prompt has one extra token, so that the tokens before it fill whole blocks. Checksums take time, so they
        are computed after the answer. Until then, only LMCache writes to full blocks.
        """
        from vllm import SamplingParams

        rng = random.Random(f"{number} of {self.job.tokens}")  # noqa: S311  # the same load for all engines
        ids = [rng.randrange(3, self.job.vocab) for _ in range(self.job.tokens + 1)]
        params = SamplingParams(temperature=0.0, max_tokens=self.job.answer, ignore_eos=True, detokenize=False)
        before = counters()
        began, first, last = time.perf_counter(), 0.0, None
        self.llm.add_request(str(number), {"prompt_token_ids": ids}, params)
        while self.llm.has_unfinished_requests():
            for output in self.llm.step():
                first = first or time.perf_counter() - began
                last = output
        answered = time.perf_counter() - began
        assert last is not None  # noqa: S101  # tells mypy that it is set
        taken = self.moves.take(self.job.wait)
        kept = time.perf_counter() - began
        sums = {}
        for what in ("stored", "loaded"):
            places = list(taken.pop(what).items())
            sums[what] = dict(
                zip((place for place, _ in places),
                    block_sums(self.layers, self.blocks, [block for _, block in places]), strict=True)
            )  # fmt: skip
        hits = (counters().get(name, 0.0) - before.get(name, 0.0)
                for name in ("vllm:external_prefix_cache_hits", "vllm:prefix_cache_hits"))  # fmt: skip
        return taken | sums | {
            "first_s": first, "answered_s": answered, "kept_s": kept, "answer": list(last.outputs[0].token_ids),
            **dict(zip(("hits", "own_hits"), hits, strict=True)),
        }  # fmt: skip


def main() -> NoReturn:
    """Run the job that the command line names. An extra first prompt compiles the kernels and is not measured."""
    end_with_parent()
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    engine = Engine(job)
    say(f"started in {engine.start_s:.0f} s, {engine.moves.how}, pages under {engine.moves.name}")
    engine.serve(-1)
    found = []
    for number in range(job.prompts):
        one = engine.serve(number)
        say(f"{number}: first token after {one['first_s']:.3f} s, {len(one['stored'])} blocks stored, "
            f"{len(one['loaded'])} loaded, {one['failed']} failed")  # fmt: skip
        found.append(one)
    result = {"start_s": engine.start_s, "name": engine.moves.name, "how": engine.moves.how,
              "prompts": found, "versions": versions()}  # fmt: skip
    Path(job.out).write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main()
