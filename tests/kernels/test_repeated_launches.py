"""Layers of a step repeat its launches: a repeated launch equals a first one, and bad arguments are still refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpilot_formats import formats
from kvpilot_kernels.check import BadInputError
from kvpilot_kernels.gpu.launch import launches, pages
from kvpilot_kernels.gpu.launch.pages import GpuPages, Plan, Shape
from kvpilot_kernels.residuals import Residuals
from support.gpu_batch import CPU, generator, poisoned, several, some_factors

K4V4, KV_HEADS, RATIO, DIM, BLOCK, ROWS = formats.parse("k4v4"), 2, 2, 64, 64, 4
SINKS = torch.ones(KV_HEADS * RATIO + 1)
SHAPE = Shape(K4V4, DIM, KV_HEADS, RATIO, BLOCK, CPU, residuals=1)
KERNELS = ("store_kernel", "decode_kernel", "reduce_kernel", "gather_kernel")
Call = SimpleNamespace
"""Arguments of one layer: `step` has the arguments that all layers share, `own` is the layer's `GpuPages`."""


class Program:
    """Stand-in for a compiled program, which runs only on a GPU. It records its launches."""

    function, packed_metadata, n_regs, metadata = 1, (), 0, SimpleNamespace(shared=0)

    def __init__(self, identity: Any, seen: list[Any]) -> None:
        self.identity, self.seen = identity, seen

    def run(self, *args: Any) -> None:
        """Record the grid, the tensors' addresses and the numbers of a launch."""
        addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x or 0 for x in args[9:]]
        self.seen.append((self.identity, args[:3], addresses))


class Compiler:
    """Stand-in for a kernel that Triton compiles and launches."""

    arg_names = ()

    def __init__(self, name: str, seen: list[Any]) -> None:
        self.name, self.seen = name, seen

    def __getitem__(self, grid: Any) -> Callable[..., Program]:
        def launch(*args: Any, **constants: Any) -> Program:
            numbers = [x for x in args if isinstance(x, int | float)]
            kind = launches.kinds(args[: -len(numbers)], tuple(numbers))
            program = Program((self.name, kind, str(constants)), self.seen)
            program.run(*grid, *[None] * 6, *args)
            return program

        return launch


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of all later launches: program, grid and arguments."""
    found: list[Any] = []
    for name in KERNELS:
        monkeypatch.setattr(pages, name, Compiler(name, found))
    device = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _device: 7)
    monkeypatch.setattr(launches, "driver", SimpleNamespace(active=device))
    monkeypatch.setattr(launches, "CompiledKernel", Program)
    monkeypatch.setattr(SHAPE, "launches", launches.Launches())
    return found


def layers() -> tuple[Call, Call]:
    """Return the arguments of two layers of a step."""
    lens = torch.full((ROWS,), 5, dtype=torch.int32)
    step = {
        "plan": Plan(SHAPE, ROWS, 2), "slots": torch.arange(ROWS), "ordinals": lens + 0,
        "table": torch.ones(ROWS, 3, dtype=torch.int32), "lens": lens, "decodes": ROWS, "scale": 0.125,
        "read": tuple(torch.zeros(2, ROWS, KV_HEADS, DIM)), "read_slots": torch.arange(ROWS), "read_ordinals": lens + 0,
    }  # fmt: skip
    return layer(step), layer(step)


def layer(step: dict[str, Any]) -> Call:
    """Return the arguments of a layer that has its own pages, keys, values and queries."""
    query, key, value = (torch.zeros(ROWS, heads, DIM) for heads in (KV_HEADS * RATIO, KV_HEADS, KV_HEADS))
    return Call(own=own(), query=query, key=key, value=value, out=torch.zeros_like(query), **step)


def own(blocks: int = 3, sinks: torch.Tensor | None = SINKS[:-1]) -> GpuPages:
    """Return a layer's pages, with residual pages and factors."""
    cache = poisoned(2 * blocks, KV_HEADS, BLOCK, K4V4, DIM)[:: 6 // blocks]
    residuals = Residuals(torch.zeros(len(cache), 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    return GpuPages(cache, SHAPE, some_factors(KV_HEADS, DIM, generator(1)), residuals, sinks)


def store(x: Call) -> None:
    """Store the layer's tokens."""
    x.own.store(x.query, x.key, x.value, x.slots, x.plan, x.decodes, x.scale, x.ordinals)


def decode(x: Call) -> None:
    """Decode the layer's queries."""
    x.own.decode(x.table, x.lens, x.plan, x.out)


def gather(x: Call) -> None:
    """Read the layer's context, and its new tokens."""
    x.own.gather(x.read_slots, x.read_ordinals, *x.read, x.key, x.value)


def run(x: Call) -> None:
    """Launch all kernels of a layer."""
    store(x)
    decode(x)
    gather(x)


def set_to(**given: Any) -> Callable[[Call], None]:
    """Return a function that replaces arguments of a layer."""
    return lambda x: vars(x).update(given)


def wider(name: str) -> Callable[[Call], None]:
    """Return a function that gives the rows of a tensor another stride."""

    def change(x: Call) -> None:
        old = getattr(x, name)
        setattr(x, name, torch.zeros(old.shape[0], old.shape[1] + 1, DIM)[:, :-1])

    return change


def unaligned(name: str) -> Callable[[Call], None]:
    """Return a function that moves a tensor to an address that is not a multiple of 16."""

    def change(x: Call) -> None:
        old = getattr(x, name)
        setattr(x, name, torch.zeros(old.numel() + 1)[1:].view(old.shape))

    return change


OTHER: dict[str, Callable[[Call], None]] = {
    "type of queries": lambda x: set_to(query=x.query.bfloat16())(x),
    "type of outputs": lambda x: set_to(out=x.out.bfloat16())(x),
    "type of new tokens": lambda x: set_to(key=x.key.half(), value=x.value.half())(x),
    "stride of queries": wider("query"), "stride of keys": wider("key"), "stride of values": wider("value"),
    "stride of outputs": wider("out"), "address of keys": unaligned("key"), "address of outputs": unaligned("out"),
    "scale": set_to(scale=0.25), "rows that decode": set_to(decodes=2), "ordinals": set_to(ordinals=None),
    "slots": lambda x: set_to(slots=x.slots[:3], ordinals=x.ordinals[:3])(x),
    "block table": set_to(table=torch.ones(ROWS, 5, dtype=torch.int32)),
    "sequences": lambda x: set_to(lens=x.lens[:2])(x),
    "memory to read into": set_to(read=tuple(torch.zeros(2, 9, KV_HEADS, DIM))),
    "context": lambda x: set_to(read_slots=x.read_slots[:2], read_ordinals=x.read_ordinals[:2])(x),
    "plan": set_to(plan=Plan(SHAPE, 2 * ROWS)),
    "rows of a sequence": lambda x: setattr(x.plan, "several", several([2, 2])),
    "overlap": lambda x: setattr(x.plan, "overlap", True),
    "number of programs": lambda x: x.own.shape.settle(1, pages.tuning.Taken(255, 2**17)),
    "stride of pages": lambda x: set_to(own=own(blocks=2))(x),
    "no sinks": lambda x: set_to(own=own(sinks=None))(x),
    "address of sinks": lambda x: set_to(own=own(sinks=SINKS[1:]))(x),
}  # fmt: skip


def as_first(x: Call, seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return programs, grids, addresses and numbers of a layer's launches by Triton, as if they were the first."""
    monkeypatch.setattr(SHAPE, "launches", launches.Launches())
    seen.clear()
    run(x)
    return seen.copy()


def test_a_layer_of_the_same_kind_repeats_all_launches_with_its_own_addresses(
    seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = layers()
    run(one)
    run(one)
    seen.clear()
    with monkeypatch.context() as without:
        for name in KERNELS:
            without.setattr(pages, name, None)
        run(two)
    assert seen.copy() == as_first(two, seen, monkeypatch)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("other", OTHER)
def test_a_layer_that_differs_launches_like_the_first_of_a_step(
    other: str, which: int, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SHAPE, "_cuts", {})
    monkeypatch.setattr(pages.tuning, "shared_memory", lambda _device: 2**18)
    monkeypatch.setattr(pages.tuning, "multiprocessors", lambda _device: 8)
    both = layers()
    if which == 0:
        OTHER[other](both[0])
    run(both[0])
    run(both[0])
    if which == 1:
        OTHER[other](both[1])
    seen.clear()
    run(both[1])
    assert seen.copy() == as_first(both[1], seen, monkeypatch)


BAD: dict[str, tuple[str, Callable[[Call], None], Callable[[Call], None]]] = {
    "integers": ("key", store, lambda x: set_to(key=x.key.long())(x)),
    "values of bytes": ("value", store, lambda x: set_to(value=x.value.byte())(x)),
    "heads that are not contiguous": ("query", store, lambda x: set_to(query=x.query.mT.contiguous().mT)(x)),
    "fewer keys": ("slots", store, lambda x: set_to(key=x.key[:3])(x)),
    "fewer heads": ("query", store, lambda x: set_to(query=x.query[:, :3])(x)),
    "slots of 32 bits": ("slots", store, lambda x: set_to(slots=x.slots.int())(x)),
    "ordinals of floats": ("ordinals", store, lambda x: set_to(ordinals=x.ordinals.float())(x)),
    "a table of 64 bits": ("block_table", decode, lambda x: set_to(table=x.table.long())(x)),
    "lengths of 64 bits": ("seq_lens", decode, lambda x: set_to(lens=x.lens.long())(x)),
    "a table for fewer sequences": ("seq_lens", decode, lambda x: set_to(table=x.table[:2])(x)),
    "fewer outputs": ("out", decode, lambda x: set_to(out=x.out[:2])(x)),
    "less memory": ("slots", gather, lambda x: set_to(read=tuple(one[:2] for one in x.read))(x)),
    "fewer ordinals": ("slots", gather, lambda x: set_to(read_ordinals=x.read_ordinals[:2])(x)),
    "new tokens that are not contiguous": ("value", gather, lambda x: set_to(value=x.value.mT.contiguous().mT)(x)),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_argument_of_a_later_layer_is_refused_before_a_launch(bad: str, seen: list[Any]) -> None:
    one, two = layers()
    for x in (one, one, two):
        run(x)
    field, launch, change = BAD[bad]
    change(two)
    seen.clear()
    with pytest.raises(BadInputError) as refused:
        launch(two)
    assert refused.value.field == field
    assert not seen
