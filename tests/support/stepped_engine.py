"""A real vLLM in one process. It records its steps, and fills residual pages with random bytes when a block gets them.

`python -m support.stepped_engine` reads the fields of `Asked` as a JSON object from stdin. It writes those of `Told` as
the last line of stdout.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from kvpilot_runtime.vllm_api.hooks import CHANGES
from kvpilot_smallmodels.stepping import in_steps
from support.own_process import ask
from support.right_drafts import right_drafts


@dataclass
class Asked:
    """Requests to serve.

    Attributes:
        rounds: prompts by round; the prompts of a round are sent together.
        tokens: tokens of each answer.
        options: options of vLLM's LLM.
        recent: tokens of the recent window, or `formats.ALL`; None for the default.
        drafts: largest number of draft tokens of a sequence in a step; 0 turns speculation off.
        method: vLLM's method of speculation.
        right: expected answers. Drafts of random length come from them, and some get a wrong token. Models with
            random weights repeat themselves too rarely for ngram drafts.
        careless: True gives residual pages to blocks with stored tokens, too, unlike our engines.
        given_up: requests that their clients cancel: the number over all rounds, and the step of the request's round.
        late: number of steps by which offloading copies are delayed.
        calibration: a file of factors, `off`, or an empty string for an engine that calibrates itself.
        drafter: the draft model, if the method needs a separate one.
        layout: vLLM's name of a KV-cache layout; an empty string leaves the choice to vLLM.
    """

    model: str
    dtype: str
    rounds: list[list[list[int]]]
    tokens: list[list[int]]
    options: dict[str, Any]
    recent: int | str | None = 64
    drafts: int = 0
    method: str = "ngram"
    right: list[list[list[int]]] = field(default_factory=list)
    careless: bool = False
    given_up: list[tuple[int, int]] = field(default_factory=list)
    late: int = 0
    calibration: str = "off"
    drafter: str = ""
    layout: str = ""


@dataclass
class Told:
    """Observations of the run.

    Attributes:
        answers: answers by round and prompt.
        cached: tokens from the prefix cache or host memory, by round and prompt.
        steps: steps of all requests in order. Each has the request's number over all rounds, the first position, the
            number of tokens, True if the request starts or restarts, its blocks, and the indices of its blocks with
            residual pages. Between them are offloading copies: `stored` or `loaded` holds pairs of a block and the
            number of the stored bytes.
        loaded, changed: blocks of all groups that came back from host memory, and those with a changed byte.
        block_size: tokens of a block.
        moved: how often a request changed its row of the batch between steps.
        poisoned: number of residual pages that were overwritten.
        drafted, accepted: number of draft tokens, and of accepted ones. `accepted` lacks the last step of each request.
        factors: factors of each rank, see `ResidualWorker.factors_of_rank`.
        metrics: kvpilot's lines on /metrics after the last answer.
        groups: spec class and layer names of each KV-cache group.
        layout: layout of the KV cache.
    """

    answers: list[list[list[int]]] = field(default_factory=list)
    cached: list[list[int]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    block_size: int = 0
    moved: int = 0
    poisoned: int = 0
    drafted: int = 0
    accepted: int = 0
    loaded: int = 0
    changed: int = 0
    factors: list[list[list[Any]]] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    groups: list[tuple[str, list[str]]] = field(default_factory=list)
    layout: str | None = None


def serve(asked: Asked) -> Told:
    """Run the requests in an engine in a separate process."""
    return Told(
        **ask(
            "support.stepped_engine",
            asked,
            KVPILOT_CALIBRATION=asked.calibration,
            KVPILOT_RECENT_TOKENS="" if asked.recent is None else str(asked.recent),
            **({"VLLM_KV_CACHE_LAYOUT": asked.layout} if asked.layout else {}),
        )
    )


class Steps:
    """Hook before an executor's `execute_model` that records each step, and overwrites residual pages of blocks."""

    def __init__(self, core: Any, asked: Asked, told: Told) -> None:
        self.told, self.choose = told, random.Random(1)
        self.executor = core.model_executor
        if asked.right and asked.method == "ngram":
            worker = self.executor.driver_worker.worker
            self.expected = expected(asked)
            self.requests: Callable[[], list[str]] = lambda: worker.model_runner.input_batch.req_ids
            worker.model_runner.drafter.propose = self.propose
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        kinds = [type(g.kv_cache_spec).__name__ for g in groups]
        told.groups = [(kind, list(group.layer_names)) for kind, group in zip(kinds, groups, strict=True)]
        self.pages = next(i for i, k in enumerate(kinds) if k == "FullAttentionSpec")
        told.block_size = groups[self.pages].kv_cache_spec.block_size
        self.numbers: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.refined: set[int] = set()
        self.rows: dict[str, int] = {}
        self.drafts: dict[str, int] = {}  # start of the step in which a request's drafts were verified
        told.layout = getattr(self.executor.vllm_config.cache_config, "kv_cache_layout", None)
        execute = self.executor.execute_model
        self.transfers = None
        if self.executor.vllm_config.kv_transfer_config is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            from support.offloading import Transfers

            connector, config = get_kv_transfer_group().connector_worker, core.scheduler.kv_cache_config
            layers = self.executor.vllm_config.compilation_config.static_forward_context
            self.transfers = Transfers(connector, config, layers, self.pages, asked.late)

        def watched(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            first = len(told.steps)
            requests = self.before(scheduled)
            result = execute(scheduled, *args, **kwargs)
            if self.transfers is not None:  # offloaded blocks are copied before the step computes its tokens
                told.steps[first:first] = self.transfers.taken()
                told.loaded, told.changed = self.transfers.loaded, self.transfers.changed
            for request, row in zip(requests, self.ask("rows_of", requests), strict=True):
                told.moved += self.rows.get(request, row) != row
                self.rows[request] = row
            return result

        self.executor.execute_model = watched

    def ask(self, what: str, *args: Any) -> Any:
        """Call a method on all ranks, and return the first rank's result."""
        return self.executor.collective_rpc(what, args=args)[0]

    def propose(self, most: int, sampled: list[list[int]], lengths: Any, *_: Any, **__: Any) -> list[list[int]]:
        """Replace vLLM's ngram proposer: propose the expected tokens, sometimes with a wrong one."""
        drafts = []
        for request, tokens, length in zip(self.requests(), sampled, lengths, strict=False):
            draft: list[int] = []
            if tokens:
                draft = self.expected[self.numbers[request]][int(length) :][: self.choose.randint(0, most)]
            if draft and self.choose.random() < 0.4:
                draft[self.choose.randrange(len(draft))] = self.choose.randrange(3, 49152)
            drafts.append(draft)
        return drafts

    def before(self, scheduled: Any) -> list[str]:
        """Record a step's requests, and fill new residual pages with random bytes."""
        for request in scheduled.finished_req_ids | (scheduled.preempted_req_ids or set()):
            self.rows.pop(request, None)
        for block, pages in getattr(scheduled, CHANGES, {}).items():
            self.refined.discard(block)
            if pages:
                self.refined.add(block)
                self.told.poisoned += len(pages)
                self.ask("poison", list(pages), self.told.poisoned)
        cached = scheduled.scheduled_cached_reqs
        found = [(r.req_id, r.num_computed_tokens, r.block_ids, True) for r in scheduled.scheduled_new_reqs]
        found += [
            (request, cached.num_computed_tokens[i], cached.new_block_ids[i], request in cached.resumed_req_ids)
            for i, request in enumerate(cached.req_ids)
        ]
        for request, begin, blocks, anew in found:
            number = self.numbers.setdefault(request, int(request.partition("-")[0]))
            stood = self.drafts.pop(request, begin - 1)
            if not anew:
                self.told.accepted += begin - 1 - stood
            if drafted := len(scheduled.scheduled_spec_decode_tokens.get(request, ())):
                self.drafts[request] = begin
                self.told.drafted += drafted
            if anew:
                self.tables[request] = []
            if blocks is not None:
                self.tables[request] += blocks[self.pages]
            table = list(self.tables[request])
            self.told.steps.append(
                {"request": number, "begin": begin, "tokens": scheduled.num_scheduled_tokens[request], "anew": anew,
                 "table": table, "refined": [i for i, block in enumerate(table) if block in self.refined]}
            )  # fmt: skip
        return [request for request, *_ in found]


def expected(asked: Asked) -> list[list[int]]:
    """Return each request's prompt followed by its expected answer."""
    pairs = zip(chain(*asked.rounds), chain(*asked.right), strict=True)
    return [prompt + answer for prompt, answer in pairs]


def give_carelessly() -> None:
    """Let the scheduler give residual pages to all newest blocks, also to those with stored tokens."""
    from kvpilot_runtime.recent import residual_pool

    manager: Any = residual_pool.ResidualManager
    stock = manager._claim

    def claim(self: Any, request: Any, *args: Any) -> None:
        stock(self, request, *args)
        for manager, newest in self.refined.items():
            for block in manager.req_to_blocks[request.request_id][-newest:]:
                if block.block_id not in self.block_pool.claims.pages:
                    self.block_pool.refine(block.block_id, request.request_id)

    manager._claim = claim


def main() -> None:
    """Serve the requests that stdin describes, and print the observations."""
    asked = Asked(**json.load(sys.stdin))
    from prometheus_client import generate_latest
    from vllm import LLM

    if asked.careless:
        give_carelessly()
    if asked.drafts:
        lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if asked.method == "ngram" else {}
        drafter = {"model": asked.drafter} if asked.drafter else {}
        speculation = {"method": asked.method, "num_speculative_tokens": asked.drafts, **lookup, **drafter}
        asked.options["speculative_config"] = speculation
    # An engine with a tokenizer calibrates itself on a text.
    options = {"enforce_eager": True, "skip_tokenizer_init": asked.calibration == "off", **asked.options}
    llm = LLM(
        asked.model, kv_cache_dtype=asked.dtype, dtype="float32",
        worker_extension_cls="support.residual_worker.ResidualWorker", **options,
    )  # fmt: skip
    told, engine = Told(), llm.llm_engine
    told.factors = engine.engine_core.engine_core.model_executor.collective_rpc("factors_of_rank")
    Steps(engine.engine_core.engine_core, asked, told)
    if asked.right and asked.method != "ngram":
        right_drafts(expected(asked))
    number = 0
    for prompts, tokens in zip(asked.rounds, asked.tokens, strict=True):
        leaving = [(n, after) for n, after in asked.given_up if number <= n < number + len(prompts)]

        def give_up(steps: int, _outputs: Sequence[Any], leaving: Sequence[tuple[int, int]] = leaving) -> None:
            engine.abort_request([str(n) for n, after in leaving if after == steps])

        answers, cached = in_steps(engine, prompts, tokens, number, give_up)
        number += len(prompts)
        told.answers.append(answers)
        told.cached.append(cached)
    told.metrics = [x for x in generate_latest().decode().splitlines() if x.startswith("kvpilot_")]
    engine.engine_core.shutdown()  # shut down before the last line of output, because workers log their exit to stdout
    print(json.dumps(asdict(told)), flush=True)


if __name__ == "__main__":
    main()
