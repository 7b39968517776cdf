"""Gather: any chunk of any sequence comes back as the CPU's code reads it."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpilot_kernels import formats
from support.gpu_batch import DIMS, Batch


@example("k4v2", 96, 16, [(64, 64), (0, 3), (130, 65)], torch.float32, True, 0)
@settings(max_examples=25)
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
    batch.pages.gather(batch.table, rows, torch.tensor(begins, dtype=torch.int32), max(chunks), key, value)
    for i, n in enumerate(chunks):
        if n:
            for out, whole in zip((key, value), batch.cpu.read(batch.table[i], lengths[i]), strict=True):
                part = whole[begins[i] :].to(dtype).float()
                mine = out[rows[i] : rows[i + 1]].float()
                assert torch.allclose(mine, part, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=2e-5)
    assert (key[rows[-1] :] == 7).all()
    assert (value[rows[-1] :] == 7).all()
