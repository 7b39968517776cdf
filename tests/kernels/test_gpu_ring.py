"""Ring slots of the GPU code equal those of the CPU code for any batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_kernels.gpu.store.ring_slots import fill_ring_slots
from kvpilot_kernels.ring import ring_slots


@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 300)), min_size=1, max_size=40), st.integers(0, 200),
    st.sampled_from([(64, 64, 1), (64, 39, 2), (64, 23, 3), (128, 64, 2)]), st.integers(0, 2**31),
)  # fmt: skip
def test_ring_slots_equal_the_cpus_and_padding_has_no_slot(
    batch: list[tuple[int, int]], padding: int, window: tuple[int, int, int], seed: int
) -> None:
    recent, ring_tokens, blocks = window
    rng = torch.Generator().manual_seed(seed)
    new = torch.tensor([n for n, _ in batch])
    lens = new + torch.tensor([before for _, before in batch])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), new.cumsum(0)])
    # The table is wider than the ring, as in vLLM, which gives block 0 to rows without one.
    table = torch.randint(0, 9, (len(batch), blocks + 3), generator=rng)
    slots = torch.full((int(starts[-1]) + padding + 1,), 77)
    fill_ring_slots(slots[:-1], starts.int(), lens.int(), table.int()[:, :blocks], recent, ring_tokens)
    owner = torch.repeat_interleave(torch.arange(len(batch)), new)
    rows = table[:, :blocks].masked_fill(table[:, :blocks] <= 0, -1)
    ago = starts[1:][owner] - torch.arange(len(owner))
    wanted = ring_slots(lens[owner] - ago, lens[owner], rows[owner], recent, ring_tokens)
    assert torch.equal(slots[: len(owner)], wanted)
    assert (slots[len(owner) : -1] == -1).all()
    assert slots[-1] == 77
