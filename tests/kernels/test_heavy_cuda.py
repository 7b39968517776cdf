"""Heavy hitters through the CUDA backend's metadata and interpreted kernels, with FlashAttention in plain torch."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1.attention.backends.fa_utils")

from cuda_engine import BLOCK, DIM, HEADS, KV_HEADS, STEP, Engine

from kvpilot_kernels.reference.attention import round_trip
from kvpilot_runtime.config.retention import HeavyHitters

BOUND = HeavyHitters(4, 100, 4 * BLOCK)
LAYERS = 2
STEPS = (
    ({"a": 90, "b": 300, "c": 31}, False),
    ({"a": 6, "b": 20, "c": 1}, True),
    ({"b": 1, "a": 160}, False),
    ({"a": 64, "b": 63, "c": 32}, True),
    ({"a": 1, "b": 1, "c": 1}, False),
    ({"c": 127, "a": 31, "b": 31}, False),
    ({"a": 31, "b": 31, "c": 64}, False),
    ({"a": 1, "b": 1, "c": 1}, True),
)
"""New tokens of each sequence, and True for a step that measures single tokens."""


def after_freeing(rng: random.Random, held: list[int], before: int) -> list[int]:
    """Free random pages between sinks and window until the cache is within its budget, as a scheduler may."""
    between = [at for at in held if 1 <= at < BOUND.first_page(before, BLOCK)]
    gone = rng.sample(between, max(0, min(len(held) - BOUND.pages(BLOCK), len(between))))
    return [at for at in held if at not in gone]


def attention(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the attention of one query [heads, DIM] to keys [tokens, kv_heads, DIM], float64 [heads, tokens]."""
    keys = key.repeat_interleave(HEADS // KV_HEADS, 1).double()
    return torch.einsum("hd,thd->ht", query.double(), keys).mul(DIM**-0.5).softmax(-1)


@pytest.mark.parametrize(("name", "room"), [("k4v4", 64), ("k8v4", 256), ("k4v2", 320), ("k2v2", 1024)])
def test_held_pages_alone_are_read_and_weigh_what_a_plain_softmax_gives_them(
    cuda: Any, name: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure sequences in one batch, with a context in several pieces or in one. Freed pages are full of NaN."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from kvpilot_runtime.bounded import heavy, heavy_cuda
    from kvpilot_runtime.bounded.attention import bounded_backend

    monkeypatch.setattr(cuda, "workspace_bytes", lambda _part: 4 * KV_HEADS * DIM * room)
    engine, rng = Engine(cuda, name, blocks=40, width=9), random.Random(7)
    # A token's answer then does not depend on the chunk in which its prompt is computed.
    engine.impl.read_back = engine.builder.read_back = True
    engine.builder.__class__ = bounded_backend(cuda.CudaBackend).get_builder_cls()
    engine.builder.kv_cache_spec = SimpleNamespace(bound=BOUND, block_size=BLOCK)
    most = BOUND.pages(BLOCK) + 1
    engine.builder.held = heavy.HeldTables(BLOCK, most, 8, torch.device("cpu"))
    engine.builder.singles = heavy_cuda.singles(engine.builder, BLOCK, most, 8)
    engine.layers[0].kv_cache = engine.cache
    weigh = heavy_cuda.weigher(engine.layers[0])
    blocks = {sequence: [engine.free.pop() for _ in range(9)] for sequence in "abc"}
    held: dict[str, list[int]] = {sequence: [] for sequence in "abc"}
    keys, values = ({s: torch.randn(0, KV_HEADS, DIM) for s in "abc"} for _ in "kv")
    decoded = freed = by_kernel = 0
    for new, alone in STEPS:
        counts = list(new.values())
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        before, told, slots = {s: len(keys[s]) for s in new}, {}, []
        query, fresh_k, fresh_v = (
            torch.randn(sum(counts), heads, DIM, generator=engine.rng) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        for i, (s, count) in enumerate(new.items()):
            rows = slice(int(starts[i]), int(starts[i + 1]))
            keys[s], values[s] = torch.cat([keys[s], fresh_k[rows]]), torch.cat([values[s], fresh_v[rows]])
            slots += [blocks[s][p // BLOCK] * BLOCK + p % BLOCK for p in range(before[s], before[s] + count)]
            had, first = held[s], -(-before[s] // BLOCK)
            held[s] = after_freeing(rng, had, before[s])
            for at in set(had) - set(held[s]):
                engine.cache[blocks[s][at]] = 255
                blocks[s][at] = -9  # a freed page must not be read
                freed += 1
            last = (len(keys[s]) - 1) // BLOCK
            told[s] = (np.array(held[s], np.int64), first)
            held[s] = [*held[s], *range(first, last + 1)]
        lens = torch.tensor([len(keys[s]) for s in new], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=len(new),
            num_actual_tokens=sum(counts), max_query_len=max(counts), max_seq_len=int(lens.max()),
            block_table_tensor=torch.tensor([blocks[s] for s in new], dtype=torch.int32),
            slot_mapping=torch.tensor(slots), causal=True, seq_lens_cpu_upper_bound=lens,
        )  # fmt: skip
        out = torch.full((sum(counts), HEADS * DIM), torch.nan)
        STEP.attn_metadata = None
        monkeypatch.setattr(heavy, "STEP", heavy.Step(told, alone, lambda new=new: list(new)))
        metadata = engine.builder.build(0, common)
        if max(counts) == 1:  # captured graphs read this table
            assert metadata.block_table.data_ptr() == engine.builder.held.table.data_ptr()
        engine.impl.forward(engine.layers[0], query, fresh_k, fresh_v, engine.cache, metadata, out.view(query.shape))
        for _ in range(LAYERS):
            weigh(query, metadata, *getattr(metadata, heavy.MARK))
        measured = (one for one in (heavy.STEP.weighing, *heavy.STEP.singles) if one is not None)
        found = {s: (pages, mass) for one in measured for s, pages, mass in one.masses()}
        by_kernel += len(heavy.STEP.singles)
        row = 0
        for s, count in new.items():
            key, value = (
                round_trip(x[s], engine.fmt, side, engine.factors) for x, side in ((keys, "key"), (values, "value"))
            )
            seen = torch.tensor([t for t in range(len(key)) if t // BLOCK in held[s]])
            rows = min(max(count // 32, 1), 8) if count > 1 else int(alone)
            wanted = torch.zeros(len(held[s]), dtype=torch.float64)
            for position in range(before[s], before[s] + count):
                own = seen[seen <= position]
                p = attention(query[row], key[own])
                answer = torch.einsum("ht,thd->hd", p, value[own].repeat_interleave(HEADS // KV_HEADS, 1).double())
                off = (out[row].view(HEADS, DIM).double() - answer).norm(dim=-1)
                assert (off < 2e-3 * answer.norm(dim=-1)).all(), (s, position)
                if position >= before[s] + count - rows:
                    places = torch.tensor([held[s].index(int(t) // BLOCK) for t in own])
                    wanted.index_add_(0, places, p.sum(0))
                row += 1
            assert (s in found) == bool(rows)
            if rows:
                pages, mass = found[s]
                assert pages == tuple(held[s])
                weight = LAYERS * (32 if count == 1 else count / rows)
                # The kernel has queries in float16, like decode.
                off = 2e-3 * weight if heavy.STEP.singles and count == 1 else 1e-4
                torch.testing.assert_close(
                    torch.tensor(mass, dtype=torch.float64), wanted * weight, rtol=1e-4, atol=off
                )
                decoded += count == 1
    assert freed > 3
    assert decoded > 1
    assert by_kernel


@pytest.mark.parametrize("room", [64, 256, 10**6])
def test_every_page_of_every_measured_sequence_is_read_once_and_no_more_at_a_time_than_there_is_room(
    cuda: Any, room: int
) -> None:
    from kvpilot_runtime.bounded import heavy_cuda
    from kvpilot_runtime.bounded.heavy_mass import Measured, Weighing

    rng, sequences = random.Random(room), []
    for i in range(12):
        pages, rows = rng.randint(1, 9), rng.choice([1, 1, 1, 3])
        sequences.append(Measured(str(i), tuple(range(pages)), i, pages * BLOCK - 3, slice(10 * i, 10 * i + rows), i))
    table = torch.arange(12 * 9, dtype=torch.int32).view(12, 9)
    weighing = Weighing(sequences, table, torch.zeros(12, 9, dtype=torch.float64))
    read: list[int] = []
    for group in heavy_cuda.groups(weighing, BLOCK, room):
        read += group.at.tolist()
        assert [piece.first for piece in group.pieces] == [0, *(piece.last for piece in group.pieces[:-1])]
        assert group.pieces[-1].last == group.table.shape[1]
        for i, at in enumerate(group.at.tolist()):
            one = sequences[at]
            assert group.rows[i].tolist() == list(range(one.rows.start, one.rows.stop))
            assert group.table[i, : len(one.pages)].tolist() == table[at, : len(one.pages)].tolist()
            assert (group.lens[i], group.weights[i]) == (one.length, at)
        for piece in group.pieces:
            places = torch.arange(piece.first * BLOCK, piece.last * BLOCK)
            slots = group.table[:, places // BLOCK] * BLOCK + places % BLOCK
            assert len(piece.slots) <= max(room, BLOCK)
            assert torch.equal(piece.slots, slots.flatten())
            assert torch.equal(piece.ordinals, (places + 1).repeat(len(group.at)))
    assert sorted(read) == list(range(12))
