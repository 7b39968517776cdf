"""The only module that knows vLLM's versions: how each is taught our dtypes, and what it calls things.

Up to 0.32 the names of KV-cache dtypes are a closed `Literal`; 0.33 has a registry for them. 0.28 asks a backend for
the shape of its cache, later versions for a layout.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

from kvpilot_formats.formats import Format
from kvpilot_runtime.errors import UnsupportedEngineError
from kvpilot_runtime.vllm_api.wrap import wrap

OLDEST, NEWEST = (0, 28), (0, 33)
RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
"""The versions that kvpilot was made for; another one is served as far as it keeps to `contract`."""

RUN_ON = {"cpu": ((0, 28), (0, 30), (0, 32)), "cuda": ((0, 32), (0, 33))}
"""The versions that were run: on a CPU by scripts/engine_matrix.sh, on a GPU by benchmarks/accuracy/gpu_versions.py."""

ADVISED = ".".join(map(str, max(set(RUN_ON["cpu"]) & set(RUN_ON["cuda"]))))
"""The version that errors tell people to use."""

RINGS_STAY_FROM = (0, 32)
"""From here on offloading leaves pages alone that stay out of prefix caching; before, it would look for rings' pages by
the hashes of prefixes (0.30; the source of 0.31 was not read)."""
SLEEP_FROM = (0, 30)
"""From here on sleep mode frees the KV cache alone; before, it took the steps' buffers, too."""

CARRIES = (0, 32)
"""The version whose connectors of `carriers` were read and run; their protocols differ from version to version."""

DISK = (0, 32)
"""The version whose tiers below host memory were read and run; they are new, and vLLM calls them experimental."""

BOUNDS_TO = (0, 33)
"""The newest version that bounded caches were run with. The GPU runner of 0.33 clears entries of block tables below the
window of whatever is a sliding window to vLLM: `bounded.spec` tells it of none."""

_BUILD = (10**6, 0)


def version_text() -> str:
    """The installed vLLM's own word for its version.

    Raises:
        UnsupportedEngineError: vLLM is absent.
    """
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedEngineError(f"vllm is not installed; install vllm {RANGE} beside kvpilot") from None


def vllm_version() -> tuple[int, int]:
    """Major and minor version of the installed vLLM; a build without numbers counts as newer than any with.

    Raises:
        UnsupportedEngineError: vLLM is absent.
    """
    found = re.match(r"(\d+)\.(\d+)", version_text())
    return (int(found[1]), int(found[2])) if found else _BUILD


def was_run_on(platform: str) -> bool:
    """Return True if kvpilot was run with the installed vLLM on `cpu` or `cuda`."""
    return vllm_version() in RUN_ON.get(platform, ())


def how_tried(platform: str) -> str:
    """Say how far the installed vLLM was tried with kvpilot, as the end of a sentence; empty where it was run."""
    if was_run_on(platform):
        return ""
    names = {"cpu": "a CPU", "cuda": "a GPU"}
    ran = ", ".join(".".join(map(str, version)) for version in RUN_ON[platform])
    other = next((names[one] for one in RUN_ON if one != platform and was_run_on(one)), "")
    known = f"run on {other} alone" if other else "not tried"
    return f"was {known} with kvpilot; on {names[platform]} {ran} ran"


def wakes_as_it_was() -> bool:
    """Whether sleep mode leaves an engine with our dtypes as it was; True where there is no vLLM to ask."""
    try:
        return vllm_version() >= SLEEP_FROM
    except UnsupportedEngineError:
        return True


def kept_graphs(platform: str) -> dict[str, str]:
    """Variables without which vLLM does not find again what it compiled.

    On a CPU 0.32 cannot load what it saved ahead of time: it traces again and saves it again, at every start.
    """
    return {"VLLM_USE_AOT_COMPILE": "0"} if platform == "cpu" else {}


def make_known(names: tuple[str, ...], asked: Callable[[str], None]) -> None:
    """Make `names` valid values of `--kv-cache-dtype`, and call `asked` with a name that an engine is configured with.

    Only data of vLLM's changes: its registry of dtypes (0.33), or its list of names and the validators that pydantic
    makes of the list. Repeating it changes nothing.
    """
    from vllm.config import cache

    if hasattr(cache, "register_kv_cache_dtype"):
        _register_handlers(names, asked)
    else:
        _extend_literal(names, asked)


def store_as_bytes(names: tuple[str, ...]) -> None:
    """Tell vLLM that pages of these dtypes are bytes; before that no layer can be made with one of them."""
    import torch
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    STR_DTYPE_TO_TORCH_DTYPE.update(dict.fromkeys(names, torch.uint8))


def _register_handlers(names: tuple[str, ...], asked: Callable[[str], None]) -> None:
    """Register each name with vLLM's own registry (0.33), which takes a class as a decorator does."""
    import torch
    from vllm.config import cache
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Packed:
        """A dtype of bytes, without a mode of vLLM's generic kernels.

        `KVQuantMode.CUSTOM` would say the latter, but has the same value as a mode of another format and is taken for
        it. NONE is what older versions find for a name that they do not know.
        """

        name: str
        told = False

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            """Answer; vLLM asks whenever it configures or makes anything with the dtype, and at no other time."""
            if not self.told:
                asked(self.name)
                self.told = True
            return KVQuantMode.NONE

    for name in names:
        if cache.get_kv_cache_dtype_handler(name) is None:
            cache.register_kv_cache_dtype(name)(type(name, (Packed,), {"name": name}))


def _extend_literal(names: tuple[str, ...], asked: Callable[[str], None]) -> None:
    """Add values to the closed Literal in place, so that every module that imported it sees them."""
    from pydantic import AfterValidator
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import VllmConfig
    from vllm.config.cache import CacheConfig, CacheDType

    known = get_args(CacheDType)
    missing = tuple(n for n in names if n not in known)
    if not missing:
        return

    def chosen(name: str) -> str:
        if name in names:
            asked(name)
        return name

    literal: Any = CacheDType
    literal.__args__ = known + missing
    # Both configurations hold a validator that was compiled from the old list. The field's type is annotated while its
    # new one is made, and stays as it was for vLLM's command line, which reads it.
    field: Any = CacheConfig.__dataclass_fields__["cache_dtype"]
    declared = field.type
    field.type = Annotated[declared, AfterValidator(chosen)]
    try:
        rebuild_dataclass(CacheConfig, force=True)
    finally:
        field.type = declared
    rebuild_dataclass(VllmConfig, force=True)


def backend_class(dtype: str) -> str:
    """The name of the class that serves a dtype of ours, in the module of its platform."""
    return f"{dtype.upper()}Backend"


def tell_cpu_blocks() -> None:
    """Before 0.30 the CPU backend says that it takes blocks of 16 tokens, and fails unless they are multiples of 32."""
    if vllm_version() >= (0, 30):
        return
    wrap("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend.get_supported_kernel_block_sizes", _of_32)


def _of_32(stock: Any, *args: Any, **kwargs: Any) -> list[Any]:
    from vllm.v1.attention.backend import MultipleOf

    return [MultipleOf(32)]


def chunks_in_host_memory(spec: Any) -> int:
    """Chunks that a `CPUOffloadingSpec` holds; in 0.28 they are called blocks."""
    return int(spec.num_chunks if hasattr(spec, "num_chunks") else spec.num_blocks)


LAYER_OUTERMOST, BLOCK_OUTERMOST = "LBHNC", ("BHLNC", "BLHNC")
"""vLLM's names of the layouts that our pages may lie in (L layers, B blocks, H heads, N tokens, C a token's bytes):
each layer by itself, and a block of all layers in a row."""


class HeadMajorPages:
    """What a backend with our pages says of its cache: uint8 [blocks, kv_heads, tokens, row_bytes], flat a head."""

    fmt: ClassVar[Format]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """From 0.29 on: any in which a head's tokens of a block are one page; the first one is what vLLM takes."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        names = (LAYER_OUTERMOST, *BLOCK_OUTERMOST)
        return tuple(KVCacheLayout[name] for name in names if name in KVCacheLayout.__members__)

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """0.28: the same as a shape in bytes."""
        return num_blocks, num_kv_heads, block_size, cls.fmt.row_bytes(head_size)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """0.28: the same, for backends of other layers that can have it either way."""
        return "HND"


@dataclass(frozen=True)
class Drafter:
    """A model that drafts, as a runner holds it.

    Attributes:
        reads_states: the served model's states are an input of it. combines_states: of several of its layers.
        uses_mrope: positions have three dimensions, as the served model's do.
    """

    model: Any
    reads_states: bool
    combines_states: bool
    uses_mrope: bool


def drafter(runner: Any) -> Drafter:
    """The model that drafts in a worker's runner, of which 0.32 has two kinds: on a GPU it is "model runner V2"."""
    if (old := getattr(runner, "drafter", None)) is not None:
        return Drafter(old.model, old.pass_hidden_states_to_model, old.eagle3_use_aux_hidden_state, old.uses_mrope)
    new = runner.speculator
    return Drafter(new.model, new.method != "draft_model", runner.use_aux_hidden_state_outputs, uses_mrope=False)


def lacks_for_bounds() -> str:
    """Return the versions that a bounded cache needs and the installed vLLM is not; nothing where vLLM is absent."""
    try:
        here = vllm_version()
    except UnsupportedEngineError:
        return ""
    served = ".".join(map(str, BOUNDS_TO))
    return "" if here <= BOUNDS_TO else f"vLLM {served} or older (here is {version_text()})"


def lacks_for_disk() -> str:
    """What a disk below offloaded pages needs and the installed vLLM is not; nothing where it is absent."""
    try:
        here = vllm_version()
    except UnsupportedEngineError:
        return ""
    served = ".".join(map(str, DISK))
    return "" if here == DISK else f"vLLM {served} (here is {version_text()})"
