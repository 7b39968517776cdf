"""A real vLLM that prefills for another engine, or decodes for one, controlled through a socket.

`python -m apart_engine ADDRESS` connects to a Unix socket, and answers each line of JSON with one line.
"""

import json
import socket
import sys
import time
from typing import Any

from kvpilot_runtime.vllm_api.hooks import CHANGES


class Engine:
    """Engine that answers questions. Each method is a question. Arguments and answers are JSON."""

    extension = "apart_worker.ApartWorker"

    def start(self, model: str, options: dict[str, Any]) -> dict[str, Any]:
        """Create the engine."""
        from prometheus_client import generate_latest
        from vllm import LLM

        llm = LLM(
            model, dtype="float32", enforce_eager=True, worker_extension_cls=self.extension, **options
        )  # fmt: skip
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.pool = self.core.scheduler.kv_cache_manager.block_pool
        self.requests, self.blind_until = 0, 0.0
        self.steps: list[dict[str, Any]] = []
        self.tables: dict[str, list[int]] = {}
        self.refined: set[int] = set()
        self.poisoned = 0
        self.workers("watch_reads")
        execute = self.core.model_executor.execute_model

        def watched(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.take_down(scheduled)
            result = execute(scheduled, *args, **kwargs)
            self.executed()
            return result

        self.core.model_executor.execute_model = watched
        groups = self.core.scheduler.kv_cache_config.kv_cache_groups
        return {
            "metrics": [x for x in generate_latest().decode().splitlines() if x.startswith("kvpilot_")],
            "layout": self.core.vllm_config.cache_config.kv_cache_layout,
            "groups": [type(g.kv_cache_spec).__name__ for g in groups],
            "factors": self.workers("factors_of_rank"),
        }  # fmt: skip

    def workers(self, what: str, *args: Any) -> list[Any]:
        """Call a method of each rank's worker, and return the results."""
        found: list[Any] = self.core.model_executor.collective_rpc(what, args=args)
        return found

    def take_down(self, scheduled: Any) -> None:
        """Record a step's requests as `support.stepped_engine.Told` has them, with blocks of the first group.

        Fill new residual pages with random bytes.
        """
        for block, pages in getattr(scheduled, CHANGES, {}).items():
            self.refined.discard(block)
            if pages:
                self.refined.add(block)
                self.poisoned += len(pages)
                self.workers("poison", list(pages), self.poisoned)
        cached = scheduled.scheduled_cached_reqs
        found = [(r.req_id, r.num_computed_tokens, r.block_ids, True) for r in scheduled.scheduled_new_reqs]
        for i, request in enumerate(cached.req_ids):
            anew = request in cached.resumed_req_ids
            found.append((request, cached.num_computed_tokens[i], cached.new_block_ids[i], anew))
        for request, begin, blocks, anew in found:
            table = [] if anew else self.tables[request]
            self.tables[request] = table = table + (blocks[0] if blocks is not None else [])
            self.steps.append(
                {"request": int(request.partition("-")[0]), "begin": begin, "anew": anew, "table": table,
                 "refined": [i for i, block in enumerate(table) if block in self.refined],
                 "tokens": scheduled.num_scheduled_tokens[request]}
            )  # fmt: skip

    def executed(self) -> None:
        """Do nothing after a step; subclasses may."""

    def serve(self, prompts: list[list[int]], tokens: list[int], params: list[Any]) -> dict[str, Any]:
        """Answer prompts together, each with its `kv_transfer_params`. Also return the blocks that were read, and all
        steps.
        """
        from vllm import SamplingParams

        first = self.requests
        for prompt, count, kv in zip(prompts, tokens, params, strict=True):
            sampling = SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, detokenize=False,
                extra_args=None if kv is None else {"kv_transfer_params": kv},
            )  # fmt: skip
            self.engine.add_request(str(self.requests), {"prompt_token_ids": prompt}, sampling)
            self.requests += 1
        found: dict[int, Any] = {}
        while self.engine.has_unfinished_requests():
            if self.blind_until and time.perf_counter() > self.blind_until:
                self.blind_until = 0.0
                self.workers("look_away", False)
            for output in self.engine.step():
                found[int(output.request_id)] = {
                    "answer": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens or 0,
                    "params": output.kv_transfer_params, "why": output.outputs[0].finish_reason,
                }  # fmt: skip
        read = [{int(name.partition("-")[0]) - first: blocks for name, blocks in r} for r in self.workers("reads")]
        for n in range(self.requests - first):
            found[first + n]["read"] = [rank[n] for rank in read if n in rank]
        steps, self.steps = self.steps, []
        return {
            "outputs": [found[n] for n in range(first, self.requests)],
            "steps": [step | ({"request": step["request"] - first} if "request" in step else {}) for step in steps],
        }  # fmt: skip

    def copies(self) -> int:
        """Return how many copies all reads of all ranks needed."""
        return sum(self.workers("copies"))

    def digests(self, blocks: list[list[int]]) -> list[list[list[str]]]:
        """Return the digests of blocks by rank and group."""
        ranks = zip(*(self.workers("digests", group) for group in blocks), strict=True)
        return [list(rank) for rank in ranks]

    def poison(self, seed: int) -> dict[str, Any]:
        """Fill every free block without a cached prefix with random bytes."""
        nobodys = [b.block_id for b in self.pool.free_block_queue.get_all_free_blocks() if b.block_hash is None]
        self.workers("poison", nobodys, seed)
        return {"poisoned": len(nobodys)}

    def lease(self, seconds: float) -> None:
        """Set how long an engine keeps the blocks of a prompt for the other engine."""
        self.core.scheduler.connector.connector_scheduler._kv_lease_duration = seconds

    def look_away(self, seconds: float) -> None:
        """Ignore the end of reads for this many seconds."""
        self.blind_until = time.perf_counter() + seconds
        self.workers("look_away", True)

    def step(self, seconds: float = 0.0) -> dict[str, Any]:
        """Run an idle engine for this long, but at least one step, in which it learns which blocks were read and frees
        them.
        """
        until = time.perf_counter() + seconds
        while True:
            self.core.step()
            if time.perf_counter() >= until:
                return {"free": self.pool.get_num_free_blocks()}
            time.sleep(0.01)


def main() -> None:
    """Answer questions until the other side closes the connection."""
    answer(Engine())


def answer(engine: Engine) -> None:
    """Answer the questions to an engine until the other side closes the connection."""
    with socket.socket(socket.AF_UNIX) as asker:
        asker.connect(sys.argv[1])
        for line in asker.makefile("r"):
            what, arguments = json.loads(line)
            asker.sendall(json.dumps(getattr(engine, what)(**arguments)).encode() + b"\n")


if __name__ == "__main__":
    main()
