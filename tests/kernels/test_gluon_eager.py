"""The interpreter of Gluon kernels detects each kind of mistake that it is meant to detect."""

import inspect
import re
import types

import numpy as np
import pytest
import torch

from kvpilot_kernels.gpu.decode import head512, kernel, queries, residuals, smem, softmax
from kvpilot_kernels.gpu.launch import pages
from kvpilot_kernels.gpu.layout import mma, unpack
from support.gluon_eager import Copies, EagerKernel, Pointer, Shared, block, inline_asm_elementwise, load, mma_v2, store
from support.gpu_batch import Batch

OWN_IMPORT = re.compile(r"^from kvpilot_kernels\.gpu\.(?!layout\.page )[\w.]+ import (\([^)]*\)|.*)", re.MULTILINE)
WORDS = torch.arange(32, dtype=torch.int32).view(4, 8)


def test_a_copy_takes_effect_at_the_wait_for_its_group() -> None:
    copies, source = Copies(), Pointer.of(WORDS)
    target = Shared.allocate(np.int32, [2, 8], None)
    for i in range(2):
        copies.async_copy_global_to_shared(target.index(i), source + (8 * i + np.arange(8)))
        copies.commit_group()
    assert (target.load(None) == -1).all()
    copies.wait_group(1)
    assert target.load(None).tolist() == [list(range(8)), [-1] * 8]
    copies.wait_group(0)
    assert target.load(None).tolist() == [list(range(8)), list(range(8, 16))]


def test_an_uncommitted_copy_takes_no_effect() -> None:
    copies, target = Copies(), Shared.allocate(np.int32, [8], None)
    copies.async_copy_global_to_shared(target, Pointer.of(WORDS) + np.arange(8))
    copies.wait_group(0)
    assert (target.load(None) == -1).all()


def test_starting_a_copy_invalidates_its_target_until_the_wait() -> None:
    copies, target = Copies(), Shared(np.arange(8, dtype=np.int32))
    copies.async_copy_global_to_shared(target, Pointer.of(WORDS) + np.arange(8))
    assert (target.load(None) == -1).all()


def test_a_second_copy_to_one_place_raises_before_the_first_has_ended() -> None:
    copies, target, source = Copies(), Shared.allocate(np.int32, [8], None), Pointer.of(WORDS) + np.arange(8)
    copies.async_copy_global_to_shared(target, source)
    copies.commit_group()
    with pytest.raises(RuntimeError, match="same place"):
        copies.async_copy_global_to_shared(target, source)
    copies.wait_group(0)
    copies.async_copy_global_to_shared(target, source)


@pytest.mark.parametrize("at", [-1, 32, 2**40])
def test_an_access_outside_its_tensor_raises_unless_masked(at: int) -> None:
    pointer = Pointer.of(WORDS) + np.array([0, at])
    with pytest.raises(IndexError):
        load(pointer)
    with pytest.raises(IndexError):
        store(pointer, np.int32(1))
    assert load(pointer, mask=np.array([True, False]), other=5).tolist() == [0, 5]


def test_an_access_past_the_last_element_of_a_view_raises() -> None:
    view = WORDS[:2, 1:3]
    assert load(Pointer.of(view) + np.array([0, 9])).tolist() == [1, 10]
    with pytest.raises(IndexError):
        load(Pointer.of(view) + 10)


def test_simulated_instructions_take_two_neighbouring_numbers_from_a_register() -> None:
    x = block(np.array([[0x1234, 0xABCD, 0x00FF, 0x0100]], np.uint16))
    masked = inline_asm_elementwise("and.b32 $0, $1, 0xf000f0;", "=r,r", [x], np.uint16, True, 2)
    assert masked.tolist() == [[0x0030, 0x00C0, 0x00F0, 0x0000]]
    # The low byte of the upper neighbour becomes the high byte of the lower one.
    moved = inline_asm_elementwise("shr.u32 $0, $1, 8;", "=r,r", [x], np.uint16, True, 2)
    assert moved.tolist() == [[0xCD12, 0x00AB, 0x0000, 0x0001]]
    with pytest.raises(ValueError, match="xor"):
        inline_asm_elementwise("xor.b32 $0, $1, 1;", "=r,r", [x], np.uint16, True, 2)


def test_a_simulated_matrix_product_takes_subnormals_exactly() -> None:
    a = block(np.full((16, 16), 3, np.uint16).view(np.float16))
    b = block(np.full((16, 8), 2.0, np.float16))
    assert (mma_v2(a, b, block(np.zeros((16, 8), np.float32))) == 16 * 6 * 2.0**-24).all()


def test_a_simulated_product_of_integers_is_exact_and_needs_full_depths() -> None:
    a, b = block(np.full((16, 32), -128, np.int8)), block(np.full((32, 8), 127, np.int8))
    assert (mma_v2(a, b, block(np.full((16, 8), 5, np.int32))) == 5 - 32 * 128 * 127).all()
    with pytest.raises(ValueError, match="mma of int8"):
        mma_v2(a[:, :16], b[:16], block(np.zeros((16, 8), np.int32)))
    with pytest.raises(ValueError, match="into float32"):
        mma_v2(a, b, block(np.zeros((16, 8), np.float32)))


def test_simulated_instructions_work_on_four_bytes_or_two_halves_of_a_register() -> None:
    x = block(np.array([0x03, 0x7F, 0x80, 0xFF], np.uint8).view(np.int8)[None])
    flipped = inline_asm_elementwise("lop3.b32 $0, $1, 0xc0c0c0c0, 0x80808080, 0x6a;", "=r,r", [x], np.int8, True, 4)
    assert flipped.tolist() == [[-128, -64, 0, 64]]
    halves = block(np.array([np.nan, 2.0], np.float16))
    smaller, limits = "min.f16x2 $0, $1, $2;", block(np.array([0x7BFF, 0x7FFF], np.uint16))
    assert inline_asm_elementwise(smaller, "=r,r,r", [halves, limits], np.float16, True, 2).tolist() == [65504, 2]
    with pytest.raises(ValueError, match="no registers"):
        inline_asm_elementwise("and.b32 $0, $1, 1;", "=r,r", [x], np.int8, True, 2)


def test_a_transpose_swaps_a_threads_row_and_column_in_each_register() -> None:
    transpose = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    # With 4 columns, a register holds rows g and g + 8 of column t: columns 2 t and 2 t + 1 of its matrix.
    x = np.arange(64, dtype=np.float16).reshape(16, 4)
    moved = inline_asm_elementwise(transpose, "=r,r", [block(x)], np.float16, True, 2)
    for g, t, half in np.ndindex(8, 4, 2):
        assert moved[g + 8 * half, t] == x[2 * t + half + 8 * (g % 2), g // 2]
    # With 8 columns, a register holds columns t and t + 4 of row g.
    x = np.arange(64, dtype=np.float16).reshape(8, 8)
    moved = inline_asm_elementwise(transpose, "=r,r", [block(x)], np.float16, True, 2)
    for g, t, half in np.ndindex(8, 4, 2):
        assert moved[g, t + 4 * half] == x[2 * t + half, g // 2 + 4 * (g % 2)]


# Each entry changes the kernel's source in a way that the hardware would not report as an error.
MISTAKES = {
    "a wait for one group too few": ("wait_group(C.stages - 1)", "wait_group(C.stages)"),
    "a prefetch into the tile that is read": ("next_stage = stage + C.stages - 1", "next_stage = stage + C.stages"),
    "no mask on what lies past the end": ("live = token < split.end", "live = token < split.end + 1"),
    "no limit of scales past the end": ("limits = gl.where(live, limits,", "limits = gl.where(live | True, limits,"),
    "no shift of the upper byte": ("return gl.inline_asm_elementwise(\"shr.u32 $0, $1, 8;\"",
                                   "return gl.inline_asm_elementwise(\"shr.u32 $0, $1, 16;\""),
    "a query's bytes in each other's columns": ("* 2 + n % 2) * C.dim", "* 2 + 1 - n % 2) * C.dim"),
    "all tokens in both columns": ("keep(x, gl.where(first, 0, 0xFFFF)", "keep(x, gl.where(first, 0xFFFF, 0)"),
    "the last tile fetched twice": ("if t < settled:", "if t < end:"),
    "a tile too many": ("if t < end:", "if t < end + C.tile:"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_the_simulation_detects_a_mistake_in_decode(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = MISTAKES[what]
    batch = Batch("k4v4", 64, [70, 33, 10], seed=9, ratio=2)
    query = batch.queries()
    wanted = batch.decode(query)
    assert wanted.isfinite().all()
    kernel = EagerKernel(broken(right, wrong), "decode_kernel")
    monkeypatch.setattr(pages, "decode_kernel", kernel)
    try:
        out = batch.decode(query)
    except (IndexError, RuntimeError):
        return
    assert not torch.allclose(out, wanted, rtol=1e-2, atol=1e-2)


def broken(right: str, wrong: str) -> types.ModuleType:
    """Return decode and its parts as one module, with one expression replaced."""
    module, found = types.ModuleType("broken"), 0
    for part in (unpack, mma, smem, queries, residuals, softmax, head512, kernel):
        source = inspect.getsource(part)
        found += source.count(right)
        # Each module sees the others' names as defined here, and line numbers stay the same.
        source = OWN_IMPORT.sub(lambda match: "\n" * match[0].count("\n"), source).replace(right, wrong)
        exec(compile(source, part.__file__, "exec"), module.__dict__)  # noqa: S102
    assert found == 1
    return module
