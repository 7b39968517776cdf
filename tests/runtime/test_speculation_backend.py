"""Steps with draft tokens in the CPU backend give the same answers as the same tokens one at a time.

A stand-in for the model runner drafts right and wrong tokens, and rejects the wrong ones. Sequences come in chunks,
change rows, and restart in other pages. As in vLLM, all pages come from one pool, which is never cleared.
"""

import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpilot_formats import formats
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.places import owners
from kvpilot_runtime.backends import cpu, packed
from kvpilot_runtime.errors import UnsupportedModelError
from kvpilot_runtime.speculation import refuse_other_drafters
from support.gpu_batch import generator, poisoned, some_factors

HEADS, KV_HEADS, DIM, BLOCK, LAYER = 4, 2, 64, 16, "model.layers.0.self_attn.attn"


@dataclass
class Part:
    """Part of a sequence in a step: tokens from `begin` on. Queries, keys and values are [tokens, heads, DIM]."""

    name: str
    begin: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    prompt: bool = False


class Runner:
    """One layer of the backend, and the pool of its pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dtype: str, recent: int, drafts: int, seed: int) -> None:
        speculation = SimpleNamespace(method="ngram", num_speculative_tokens=drafts) if drafts else None
        config = SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype=dtype), speculative_config=speculation, kv_transfer_config=None,
            compilation_config=SimpleNamespace(static_forward_context={}),
        )  # fmt: skip
        monkeypatch.setattr(packed, "get_current_vllm_config", lambda: config)
        monkeypatch.setattr(packed, "window", lambda _config: recent)
        monkeypatch.setattr(packed, "calibration_of", lambda _config: None)
        self.fmt, self.choose = formats.parse(dtype), random.Random(seed)
        self.impl = cpu.CpuImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, dtype)
        self.layer = SimpleNamespace(impl=self.impl, layer_name=LAYER)
        config.compilation_config.static_forward_context[LAYER] = self.layer
        self.impl.set_factors(self.layer, some_factors(KV_HEADS, DIM, generator(7)))
        self.cache = poisoned(400, KV_HEADS, BLOCK, self.fmt, DIM)
        self.free = list(range(1, 400))
        self.tables: dict[str, list[int]] = {}
        self.builder = cpu.CpuBuilder(SimpleNamespace(block_size=BLOCK), [LAYER], config, torch.device("cpu"))
        self.residuals = self.impl.residuals(self.cache)

    def taken(self) -> int:
        return self.free.pop(self.choose.randrange(len(self.free)))

    def grow(self, blocks: list[int], count: int) -> None:
        """Give a sequence more blocks, each with residual pages if there is a window."""
        while len(blocks) < count:
            blocks.append(self.taken())
            if self.residuals is not None:
                pages = self.residuals.pages[blocks[-1]]
                pages.copy_(torch.tensor([self.taken() for _ in pages]))

    def forget(self, name: str) -> None:
        """End or preempt a sequence. Its blocks and residual pages return to the pool unchanged."""
        for block in self.tables.pop(name, []):
            self.free.append(block)
            if self.residuals is not None:
                self.free += self.residuals.pages[block].tolist()
                self.residuals.pages[block] = 0

    def step(self, parts: list[Part], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
        """Return the outputs of each part, [tokens, HEADS, DIM]."""
        counts = [len(part.query) for part in parts]
        ends = [part.begin + count for part, count in zip(parts, counts, strict=True)]
        table = torch.zeros(len(parts), 64, dtype=torch.int32)
        slots = []
        for i, (part, end) in enumerate(zip(parts, ends, strict=True)):
            blocks = self.tables.setdefault(part.name, [])
            self.grow(blocks, -(-end // BLOCK))
            table[i, : len(blocks)] = torch.tensor(blocks)
            slots += [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(part.begin, end)]
        common = SimpleNamespace(
            num_reqs=len(parts), causal=True, block_table_tensor=table, slot_mapping=torch.tensor(slots),
            mm_req_doc_ranges=None,
            query_start_loc=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32), is_prefilling=torch.tensor([p.prompt for p in parts]),
        )  # fmt: skip
        metadata = {LAYER: self.builder.build(0, common)}
        monkeypatch.setattr(cpu, "get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata))
        query, key, value = (torch.cat([getattr(p, side) for p in parts]) for side in ("query", "key", "value"))
        self.impl.do_kv_cache_update(self.layer, key, value, self.cache, common.slot_mapping)
        out = torch.full((len(query), HEADS * DIM), torch.nan)
        self.impl.forward(self.layer, query, key, value, self.cache, metadata[LAYER], out)
        return list(out.view(-1, HEADS, DIM).split(counts))


class Sequence:
    """Sequence whose right tokens are known. `done` tokens are stored, and the first `prompt` tokens are its prompt."""

    def __init__(self, name: str, choose: random.Random, rng: torch.Generator) -> None:
        self.name, self.done, self.prompt, self.length = name, 0, choose.randint(1, 100), choose.randint(110, 180)
        self.right = [torch.randn(self.length, heads, DIM, generator=rng) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def part(self, count: int, right: int, rng: torch.Generator, prompt: bool = False) -> Part:
        """Return the next `count` tokens. Only the first `right` of them are right."""
        rows = [x[self.done : self.done + right] for x in self.right]
        rows = [torch.cat([x, torch.randn(count - right, *x.shape[1:], generator=rng)]) for x in rows]
        return Part(self.name, self.done, *rows, prompt=prompt)


@pytest.mark.parametrize(
    ("dtype", "recent", "drafts"),
    [("int8", 0, 4), ("k8v4", 64, 3), ("k4v4", 0, 7), ("k4v4", 64, 1), ("k4v4", 64, 7), ("k4v4", 64, 24),
     ("k4v2", 128, 5), ("k2v2", 64, 3)],
)  # fmt: skip
def test_steps_with_drafts_give_the_same_outputs_as_single_tokens(
    dtype: str, recent: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = 20261122 + drafts
    choose, rng = random.Random(seed), generator(seed)
    with_drafts = Runner(monkeypatch, dtype, recent, drafts, seed)
    plain = Runner(monkeypatch, dtype, recent, 0, seed + 1)
    live = [Sequence(f"s{i}", choose, rng) for i in range(5)]
    accepted = refused = preempted = exact = judged = 0
    while live:
        choose.shuffle(live)
        parts, rights = [], []
        for s in live:
            if s.done < s.prompt:
                count = min(choose.randint(1, 48), s.prompt - s.done)
                parts.append(s.part(count, count, rng, prompt=True))
                rights.append(count)
            else:
                right = min(1 + choose.randint(0, drafts), s.length - s.done)
                count = max(right, min(1 + choose.randint(0, drafts), s.length - s.done))
                parts.append(s.part(count, right, rng))
                rights.append(right)
                accepted, refused = accepted + right - 1, refused + count - right
        found = with_drafts.step(parts, monkeypatch)
        for s, part, right, answer in zip(live, parts, rights, found, strict=True):
            if part.prompt:
                [wanted] = plain.step([part], monkeypatch)
            else:
                alone = [
                    plain.step([Part(s.name, s.done + i, part.query[i : i + 1], part.key[i : i + 1],
                                     part.value[i : i + 1])], monkeypatch)[0]
                    for i in range(right)
                ]  # fmt: skip
                wanted = torch.cat(alone)
            # With a window, a draft in the next block moves the window of all tokens of the step.
            stored, first = -(-(s.done + len(part.query)) // BLOCK), s.done
            same = [i for i in range(right) if not recent or part.prompt or -(-(s.done + i + 1) // BLOCK) == stored]
            s.done += right
            if not same:
                continue
            answer, wanted = answer[same], wanted[same]
            # An element near the boundary between two codes may get either code, because the order of sums differs.
            assert ((answer - wanted).norm(dim=-1) < 2e-3 * wanted.norm(dim=-1)).all(), (s.name, first)
            exact += int((answer - wanted).abs().max() < 1e-5)
            judged += 1
        for s in list(live):
            if s.done == s.length:
                live.remove(s)
            elif s.done > s.prompt and choose.random() < 0.01 * (
                1 + drafts
            ):  # After a preemption, all tokens are computed again, in other pages.
                preempted += 1
                s.prompt, s.done = s.done, 0
            else:
                continue
            with_drafts.forget(s.name)
            plain.forget(s.name)
    assert min(accepted, refused, preempted) > 0
    assert exact > 0.9 * judged


def test_the_last_tokens_of_a_prompt_are_prefilled_and_not_treated_as_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Runner(monkeypatch, "k2v2", 0, 3, 5)
    monkeypatch.setattr(runner.impl, "_factors", Factors.identity(KV_HEADS, DIM))
    rng = generator(5)
    key, value = (torch.randn(3, KV_HEADS, DIM, generator=rng) for _ in "kv")
    part = Part("a", 0, torch.zeros(3, HEADS, DIM), key, value, prompt=True)
    [found] = runner.step([part], monkeypatch)
    mean = value.cumsum(0) / torch.arange(1, 4)[:, None, None]
    assert torch.allclose(found, mean.repeat_interleave(2, 1), atol=1e-6)
    runner.forget("a")
    part.prompt = False  # Like drafts, these tokens are read from the 2-bit pages.
    [found] = runner.step([part], monkeypatch)
    assert (found - mean.repeat_interleave(2, 1)).abs().max() > 0.1


def test_every_row_attends_to_its_sequence_up_to_itself_and_padding_to_nothing() -> None:
    starts, lens = torch.tensor([0, 3, 4, 4, 6], dtype=torch.int32), torch.tensor([10, 5, 7, 2], dtype=torch.int32)
    owner, seen = owners(starts, lens, 8)
    assert owner[:6].tolist() == [0, 0, 0, 1, 3, 3]
    assert seen.tolist() == [8, 9, 10, 5, 1, 2, 0, 0]
    assert (owner.max(), seen.dtype) == (3, torch.int32)


@pytest.mark.parametrize("method", ["medusa", "dflash", "ngram_gpu", "custom_class"])
def test_unsupported_draft_methods_are_refused_when_a_layer_is_created(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(speculative_config=SimpleNamespace(method=method, num_speculative_tokens=2))
    monkeypatch.setattr(packed, "get_current_vllm_config", lambda: config)
    with pytest.raises(UnsupportedModelError, match=rf"'{method}' \(ngram, .* and mtp are served\).*'k4v4'.*auto"):
        cpu.CpuImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, "k4v4")


@pytest.mark.parametrize(
    ("beside", "changed"),
    [("tensor parallelism", {"parallel_config": SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)}),
     ("pipeline parallelism", {"parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=2)}),
     ("adapters", {"lora_config": SimpleNamespace()}), ("offloading", {"kv_transfer_config": SimpleNamespace()})],
)  # fmt: skip
@pytest.mark.parametrize("method", ["ngram", "draft_model", "mtp"])
def test_a_draft_model_is_refused_with_options_that_were_never_tested_with_it(
    method: str, beside: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1), "lora_config": None,
        "kv_transfer_config": None,
        "speculative_config": SimpleNamespace(method=method, num_speculative_tokens=2),
    }  # fmt: skip
    refuse_other_drafters(SimpleNamespace(**plain), "k4v4")
    asked = SimpleNamespace(**{**plain, **changed})
    if method == "ngram":
        refuse_other_drafters(asked, "k4v4")
        return
    with pytest.raises(UnsupportedModelError, match=f"a model that drafts, beside {beside}, is not .* leave it out"):
        refuse_other_drafters(asked, "k4v4")
