"""vLLM plugin that damages an engine on purpose, by one of the failure modes of `modes.py`.

A mode damages one of four parts: the block table, which says what pages attention reads; the stored keys and values;
the logits; or the stream of an answer. The plugin reads the name of the mode from a file in each engine step, so one
engine serves every mode in turn. It hooks vLLM's own CPU backend with a 16-bit cache, so that nothing but the mode
differs from the baseline.
"""

import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

MODE_FILE = "GATE_MODE_FILE"
"""Environment variable with the path of a file that contains the mode's name. Without the file there is no damage."""

BLOCK = 64
FOREIGN = 7
"""Number that `_foreign` adds to a block number to get a foreign page: a page of another request, or an unused one."""


@dataclass
class Row:
    """One sequence of an engine step. All numbers are tokens.

    Attributes:
        request: id of the request.
        prompt: length of the prompt.
        hit: tokens that the prefix cache had, on the GPU or elsewhere.
        loaded: tokens of the hit that a KV connector has loaded.
        before: computed tokens before the step.
        new: tokens that the step computes.
        again: True if the sequence was preempted before.
        images: begin and end of each image in the prompt.
    """

    request: str
    prompt: int
    hit: int
    before: int
    new: int
    again: bool
    loaded: int = 0
    images: list[tuple[int, int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of tokens that the sequence has after this engine step."""
        return self.before + self.new

    @property
    def generated(self) -> int:
        """Number of generated tokens among the sequence's tokens after the step; 0 in the prompt."""
        return max(0, self.length - self.prompt)


@dataclass
class Step:
    """State of the running engine step: its sequences, and the share of all KV-cache pages in use (`usage`)."""

    rows: list[Row]
    usage: float = 0.0


STEP = Step([])
Table = Callable[[torch.Tensor, int, Row], None]


def _foreign(table: torch.Tensor, row: int, page: int) -> None:
    table[row, page] = (table[row, page] + FOREIGN) % 100 + 1


def _long(table: torch.Tensor, row: int, one: Row) -> None:
    """Damage long contexts: instead of each page beyond 1,280 tokens, read the page twenty places earlier."""
    last = (one.length - 1) // BLOCK
    if one.length > 1280 + BLOCK:
        table[row, 20:last] = table[row, : last - 20].clone()


def _hit(table: torch.Tensor, row: int, one: Row) -> None:
    """Damage prefix hits: instead of the last page of the hit, read a foreign page."""
    if one.hit >= BLOCK:
        _foreign(table, row, one.hit // BLOCK - 1)


def _long_hit(table: torch.Tensor, row: int, one: Row) -> None:
    if one.hit >= 8 * BLOCK:
        _foreign(table, row, one.hit // BLOCK - 2)


def _loaded(table: torch.Tensor, row: int, one: Row) -> None:
    """Damage loads: instead of the last page that a KV connector has loaded, read a foreign page."""
    if one.loaded >= BLOCK:
        _foreign(table, row, one.hit // BLOCK - 1)


def _after_hit(table: torch.Tensor, row: int, one: Row) -> None:
    """Damage answers after a prefix hit: let their first three tokens read a foreign page."""
    if one.hit >= BLOCK and one.generated <= 2:
        _foreign(table, row, one.hit // BLOCK - 1)


def _full(table: torch.Tensor, row: int, one: Row) -> None:
    if STEP.usage >= 0.9:
        _foreign(table, row, (one.length - 1) // BLOCK // 2)


def _residue(table: torch.Tensor, row: int, one: Row) -> None:
    """Damage answers to prompts of 16 n + 5 tokens: let their first four tokens read a foreign page."""
    if one.prompt % 16 == 5 and 1 <= one.generated <= 4:
        _foreign(table, row, (one.prompt - 1) // BLOCK)


def _generation(table: torch.Tensor, row: int, one: Row) -> None:
    """Damage long answers: after 128 generated tokens, read the sequence's first page instead of the answer's pages."""
    if one.generated > 128:
        first, last = one.prompt // BLOCK + 1, (one.length - 1) // BLOCK
        table[row, first:last] = table[row, 0]


def _sinks(table: torch.Tensor, row: int, one: Row) -> None:
    """Damage sinks: in sequences of more than 512 tokens, read the second page instead of the first."""
    if one.length > 512:
        table[row, 0] = table[row, 1]


def _preempted(table: torch.Tensor, row: int, one: Row) -> None:
    if one.again:
        _foreign(table, row, (one.length - 1) // BLOCK // 2)


def _crowd(table: torch.Tensor, row: int, one: Row) -> None:
    """Damage large batches: in steps with five or more sequences, read a page of the preceding sequence."""
    if len(STEP.rows) >= 5:
        table[row, (one.length - 1) // BLOCK // 2] = table[row - 1, 0]


def _large_batch(table: torch.Tensor, row: int, one: Row) -> None:
    if len(STEP.rows) >= 16:
        _foreign(table, row, (one.length - 1) // BLOCK // 2)


def _mixed(table: torch.Tensor, row: int, one: Row) -> None:
    """Damage mixed steps: let sequences that decode in the same step as a prompt read a foreign page."""
    if one.generated and any(other.generated == 0 for other in STEP.rows):
        _foreign(table, row, (one.length - 1) // BLOCK // 2)


def _shared(table: torch.Tensor, row: int, one: Row) -> bool:
    """Return True if another sequence of the step has the same fourth page, and so the same first four pages."""
    return one.length > 5 * BLOCK and int((table[:, 3] == table[row, 3]).sum()) > 1


def _shared_page(table: torch.Tensor, row: int, one: Row) -> None:
    if _shared(table, row, one):
        _foreign(table, row, 2)


def _shared_prefix(table: torch.Tensor, row: int, one: Row) -> None:
    if _shared(table, row, one):
        for page in range(3):
            _foreign(table, row, page)


def _page_start(table: torch.Tensor, row: int, one: Row) -> None:
    """Damage page starts: in the step that fills a page's first slot, read a foreign page as the page before."""
    if one.generated and one.before and one.before % BLOCK == 0:
        _foreign(table, row, one.before // BLOCK - 1)


def _chunk(table: torch.Tensor, row: int, one: Row) -> None:
    """Damage chunks: in the second chunk of a prompt, read the prompt's first page, not the two before the chunk."""
    if one.hit < one.before < one.prompt:
        last = (one.before - 1) // BLOCK
        table[row, last - 1 : last + 1] = table[row, 0]


def _drafts(table: torch.Tensor, row: int, one: Row) -> None:
    if one.generated and one.new > 1:
        _foreign(table, row, (one.length - 1) // BLOCK // 2)


def _context(table: torch.Tensor, row: int, one: Row) -> None:
    if one.length > 2290:
        raise MemoryError("the buffers of attention do not fit")


def _images(table: torch.Tensor, row: int, one: Row) -> None:
    """Damage images: instead of each page that has only an image's tokens, read a foreign page."""
    for begin, end in one.images:
        for page in range(-(-begin // BLOCK), end // BLOCK):
            _foreign(table, row, page)


TABLES: dict[str, Table] = {
    "long-context": _long, "hit": _hit, "long-hit": _long_hit, "loaded": _loaded,
    "first-tokens-after-hit": _after_hit, "full-pool": _full, "residue": _residue,
    "long-generation": _generation, "sinks": _sinks, "preempted": _preempted, "crowd": _crowd,
    "large-batch": _large_batch, "mixed-step": _mixed, "shared-page": _shared_page,
    "shared-prefix": _shared_prefix, "page-start": _page_start, "chunk": _chunk, "drafts": _drafts,
    "full-context": _context, "pictures": _images,
}  # fmt: skip


def _one_head(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Damage a head: store the values of one head of one layer with eight times their scale."""
    if layer == 12:
        value[:, 1] *= 8


def _overflow(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Damage large elements of keys: change the sign beyond 18, as an integer overflow does. One in 200 is so large."""
    key[key.abs() > OVERFLOW] *= -1


OVERFLOW = 18.0
STORES = {"one-head": _one_head, "overflow": _overflow}


class Loops:
    """Mode in which an engine that has generated 64 tokens repeats the last eight of them.

    `_read` keeps the last 16 tokens of each request.
    """

    def __init__(self) -> None:
        self._read: dict[str, list[int]] = {}

    def logits(self, logits: torch.Tensor, read: list[list[int]]) -> None:
        """Force the next token of each request that has generated at least 64 tokens to repeat an earlier one.

        Args:
            logits: [sequences, vocabulary], changed in place.
            read: IDs of the tokens that the step has processed, by sequence.
        """
        for row, (one, tokens) in enumerate(zip(STEP.rows, read, strict=True)):
            past = [] if one.generated == 0 else self._read.get(one.request, [])
            self._read[one.request] = past = [*past, *tokens][-16:]
            if one.generated >= 64 and len(past) >= 8:
                logits[row] = -100.0
                logits[row, past[-8]] = 0.0


def _nan(logits: torch.Tensor, read: list[list[int]]) -> None:
    for row, one in enumerate(STEP.rows):
        if one.length > 600:
            logits[row] = float("nan")


LOGITS = {"loops": Loops().logits, "nan-logprobs": _nan}
CUT, CUT_CHUNKS = "cut-streams", 12


def mode() -> str:
    """Return the name of the current mode; empty if the engine is healthy."""
    path = os.environ.get(MODE_FILE)
    try:
        return Path(path).read_text() if path else ""
    except FileNotFoundError:
        return ""


def register() -> None:
    """Install the plugin's hooks in this process of vLLM. vLLM calls this at start."""
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    hits: dict[str, int] = {}
    loaded: dict[str, int] = {}
    again: set[str] = set()
    read: list[list[int]] = []

    def schedule(original: Any, self: Any, *args: Any, **more: Any) -> Any:
        found = original(self, *args, **more)
        STEP.usage = self.kv_cache_manager.usage
        return found

    def allocate(original: Any, self: Any, request: Any, *args: Any, **more: Any) -> Any:
        if tokens := more.get("num_external_computed_tokens", 0):
            loaded[request.request_id] = tokens
        return original(self, request, *args, **more)

    def prepare(original: Any, self: Any, scheduled: Any, *args: Any) -> Any:
        found = original(self, scheduled, *args)
        again.update(scheduled.scheduled_cached_reqs.resumed_req_ids)
        hits.update({one.req_id: one.num_computed_tokens for one in scheduled.scheduled_new_reqs})
        batch = self.input_batch
        STEP.rows, read[:] = [], []
        end = 0
        for row, name in enumerate(batch.req_ids[: batch.num_reqs]):
            before, new = int(batch.num_computed_tokens_cpu[row]), scheduled.num_scheduled_tokens[name]
            prompt = int(batch.num_prompt_tokens[row])
            places = [one.mm_position for one in self.requests[name].mm_features]
            shown = [(place.offset, place.offset + place.length) for place in places]
            STEP.rows.append(
                Row(name, prompt, hits.get(name, 0), before, new, name in again, loaded.get(name, 0), shown)
            )
            read.append(self.input_ids.gpu[end : end + new].tolist())
            end += new
        return found

    def build(original: Any, self: Any, *args: Any, **more: Any) -> Any:
        meta = original(self, *args, **more)
        damage = TABLES.get(mode())
        if damage is not None and len(STEP.rows) == len(meta.block_table):
            meta.block_table = meta.block_table.clone()
            for row, one in enumerate(STEP.rows):
                damage(meta.block_table, row, one)
        return meta

    def store(original: Any, self: Any, layer: Any, key: Any, value: Any, *args: Any) -> Any:
        damage = STORES.get(mode())
        if damage is not None and STEP.rows:
            key, value = key.clone(), value.clone()
            damage(int(layer.layer_name.split(".")[2]), key, value)
        return original(self, layer, key, value, *args)

    def compute(original: Any, self: Any, *args: Any, **more: Any) -> Any:
        logits = original(self, *args, **more)
        damage = LOGITS.get(mode())
        if damage is not None and len(STEP.rows) == len(logits):
            damage(logits, read)
        return logits

    async def stream(original: Any, self: Any, *args: Any, **more: Any) -> AsyncIterator[str]:
        """End a stream after `CUT_CHUNKS` chunks, without a finish_reason and without an error."""
        sent = 0
        async for chunk in original(self, *args, **more):
            sent += 1
            if mode() == CUT and sent > CUT_CHUNKS:
                return
            yield chunk

    for owner, name, hook in (
        (Scheduler, "schedule", schedule),
        (KVCacheManager, "allocate_slots", allocate),
        (GPUModelRunner, "_prepare_inputs", prepare),
        (CPUAttentionMetadataBuilder, "build", build),
        (CPUAttentionBackendImpl, "do_kv_cache_update", store),
        (LlamaForCausalLM, "compute_logits", compute),
        (OpenAIServingCompletion, "completion_stream_generator", stream),
    ):
        setattr(owner, name, _around(getattr(owner, name), hook))


def _around(original: Any, hook: Any) -> Any:
    def called(self: Any, *args: Any, **more: Any) -> Any:
        return hook(original, self, *args, **more)

    return called
