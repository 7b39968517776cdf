"""`gather` returns the same as the CPU code, for any chunk of any sequence."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpilot_formats import formats
from kvpilot_kernels.check import BadInputError
from kvpilot_kernels.places import joined_slots, stored_slots
from support.gpu_batch import DIMS, Batch


@example("k4v2", 96, 16, [(64, 64), (0, 3), (130, 65)], torch.float32, True, 0)
@settings(max_examples=12)
@given(
    st.sampled_from(formats.own_names()), st.sampled_from(DIMS), st.sampled_from([16, 48, 64]),
    st.lists(st.tuples(st.integers(0, 130), st.integers(0, 130)), min_size=1, max_size=3),
    st.sampled_from([torch.float16, torch.float32]), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_a_chunk_of_every_context_equals_what_the_cpu_reads(
    name: str, dim: int, block_size: int, wanted: list[tuple[int, int]], dtype: torch.dtype, calibrated: bool, seed: int
) -> None:
    begins, lengths = [begin for begin, _ in wanted], [begin + n for begin, n in wanted]
    batch = Batch(name, dim, lengths, seed, block_size=block_size, calibrated=calibrated)
    chunks = [n for _, n in wanted]
    rows = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    key, value = (torch.full((sum(chunks) + 2, 2, dim), 7.0, dtype=dtype) for _ in "kv")
    places = stored_slots(batch.table, rows, torch.tensor(begins, dtype=torch.int32), sum(chunks), block_size)
    batch.pages.gather(*places, key, value)
    for i, n in enumerate(chunks):
        if n:
            for out, whole in zip((key, value), batch.cpu.read(batch.table[i], lengths[i]), strict=True):
                part = whole[begins[i] :].to(dtype).float()
                mine = out[rows[i] : rows[i + 1]].float()
                assert torch.allclose(mine, part, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=2e-5)
    assert (key[rows[-1] :] == 7).all()
    assert (value[rows[-1] :] == 7).all()


@settings(max_examples=8)
@given(
    st.sampled_from(formats.own_names()), st.sampled_from([64, 96]), st.sampled_from([16, 64]),
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=3), st.integers(0, 2**31),
)  # fmt: skip
def test_gather_puts_new_tokens_unquantized_after_their_context(
    name: str, dim: int, block_size: int, sequences: list[tuple[int, int]], seed: int
) -> None:
    lengths, new = [sum(one) for one in sequences], [fresh for _, fresh in sequences]
    batch = Batch(name, dim, lengths, seed, block_size=block_size)
    rows, starts = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (lengths, new))
    wide = torch.randn(2, sum(new), 3, dim, generator=batch.rng)  # Rows of fresh tokens have a different stride.
    fresh, read = wide[:, :, :2], torch.full((2, sum(lengths), 2, dim), 7.0)
    batch.pages.gather(*joined_slots(batch.table, rows, starts, sum(lengths), block_size), *read, *fresh)
    for i, (context, count) in enumerate(sequences):
        assert read[:, rows[i + 1] - count : rows[i + 1]].equal(fresh[:, starts[i] : starts[i + 1]])
        for mine, whole in zip(read, batch.cpu.read(batch.table[i], lengths[i]), strict=True):
            assert torch.allclose(mine[rows[i] : rows[i] + context], whole[:context].float(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("ordinals", "rows", "message"),
    [
        (torch.ones(2, dtype=torch.int32), 3, "slots has 3 tokens; ordinals has 2, key_out 3 and value_out 3"),
        (torch.ones(3, dtype=torch.int32), 2, "slots has 3 tokens; ordinals has 3, key_out 2 and value_out 2"),
        (torch.ones(3), 3, r"ordinals are torch.float32 \(3,\); give one int32 for each of the 3 slots"),
    ],
)
def test_tokens_without_an_ordinal_or_output_row_are_refused(ordinals: torch.Tensor, rows: int, message: str) -> None:
    batch = Batch("k4v4", 64, [20], 1)
    read = torch.full((rows, 2, 64), 7.0)
    with pytest.raises(BadInputError, match=message):
        batch.pages.gather(torch.arange(3), ordinals, read, read)
    assert (read == 7).all()


def test_sequences_without_tokens_in_a_chunk_take_no_slots() -> None:
    table = torch.tensor([[5, 6], [7, 8], [9, 10], [11, 12]], dtype=torch.int32)
    rows, begins = torch.tensor([0, 0, 2, 2, 5], dtype=torch.int32), torch.tensor([3, 15, 0, 0], dtype=torch.int32)
    slots, ordinals = stored_slots(table, rows, begins, 5, 16)
    assert slots.tolist() == [7 * 16 + 15, 8 * 16, *range(11 * 16, 11 * 16 + 3)]
    assert ordinals.tolist() == [16, 17, 1, 2, 3]
