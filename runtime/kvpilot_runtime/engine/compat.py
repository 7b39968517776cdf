"""The only module that knows vLLM's versions: how each is taught our dtypes, and what it calls things.

Up to 0.32 the names of KV-cache dtypes are a closed `Literal`; 0.33 has a registry for them. 0.28 asks a backend for
the shape of its cache, later versions for a layout. No version sizes shared pages by the layers that have the dtype:
that is wrapped.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from kvpilot_kernels.formats import Format
from kvpilot_runtime.errors import UnsupportedEngineError

OLDEST, NEWEST = (0, 28), (0, 33)
RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
"""The versions that kvpilot was made for; another one is served as far as it keeps to `contract`."""

RINGS_STAY_FROM = (0, 32)
"""From here on offloading leaves pages alone that stay out of prefix caching; before, it would look for rings' pages by
the hashes of prefixes (0.30; the source of 0.31 was not read)."""
SLEEP_FROM = (0, 30)
"""From here on sleep mode frees the KV cache alone; before, it took the steps' buffers, too."""

CARRIES = (0, 32)
"""The version whose connectors of `carriers` were read and run; their protocols differ from version to version."""

DISK = (0, 32)
"""The version whose tiers below host memory were read and run; they are new, and vLLM calls them experimental."""

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


def tested() -> bool:
    """Whether the installed vLLM is of a version that kvpilot was made for."""
    return OLDEST <= vllm_version() <= NEWEST


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


def register_dtypes(names: tuple[str, ...]) -> None:
    """Make `names` valid values of `--kv-cache-dtype`, stored as bytes in pages that 16-bit layers can share.

    Repeating it changes nothing.
    """
    import torch
    from vllm.config import cache
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    STR_DTYPE_TO_TORCH_DTYPE.update(dict.fromkeys(names, torch.uint8))
    _share_pages(names)
    if hasattr(cache, "register_kv_cache_dtype"):
        _register_handlers(names)
    else:
        _extend_literal(names)


def _register_handlers(names: tuple[str, ...]) -> None:
    """Register each name with vLLM's own registry (0.33), which takes a class as a decorator does."""
    import torch
    from vllm.config import cache
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Packed:
        """What vLLM asks of a dtype: bytes to store, and no mode of its generic kernels.

        `KVQuantMode.CUSTOM` would say the latter, but has the same value as a mode of another format and is taken for
        it. NONE is what older versions find for a name that they do not know.
        """

        name: str

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            return KVQuantMode.NONE

    for name in names:
        if cache.get_kv_cache_dtype_handler(name) is None:
            cache.register_kv_cache_dtype(name)(type(name, (Packed,), {"name": name}))


def _extend_literal(names: tuple[str, ...]) -> None:
    """Add values to the closed Literal in place, so that every module that imported it sees them."""
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import VllmConfig
    from vllm.config.cache import CacheConfig, CacheDType

    known = get_args(CacheDType)
    missing = tuple(n for n in names if n not in known)
    if not missing:
        return
    literal: Any = CacheDType
    literal.__args__ = known + missing
    # Both hold a validator that was compiled from the old list.
    rebuild_dataclass(CacheConfig, force=True)
    rebuild_dataclass(VllmConfig, force=True)


def backend_class(dtype: str) -> str:
    """The name of the class that serves a dtype of ours, in the module of its platform."""
    return f"{dtype.upper()}Backend"


def tell_cpu_blocks() -> None:
    """Before 0.30 the CPU backend says that it takes blocks of 16 tokens, and fails unless they are multiples of 32."""
    if vllm_version() >= (0, 30):
        return
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda: [MultipleOf(32)])


def _share_pages(names: tuple[str, ...]) -> None:
    """Let layers in 16 bits (`--kv-cache-dtype-skip-layers`) share the block pool with layers in a dtype of `names`.

    All pages of a pool have one size. vLLM takes the quantized layers' page for it and gives the others blocks of as
    many tokens as fit, but it asks the backend of the model's first layer for both sizes, which may be a 16-bit one.
    Here a layer that has the dtype answers, the page holds the smallest block of every backend, and a model without
    16-bit layers keeps its block size.
    """
    from vllm.platforms.interface import Platform

    stock = getattr(getattr(Platform, "_align_heterogeneous_kv_block_size", None), "__func__", None)
    if stock is None or getattr(Platform, "_kvpilot_shares_pages", False):
        return  # where it is not there, dtypes of ours are refused beside layers in 16 bits

    def align(cls: Any, vllm_config: Any, backend_cls: Any) -> None:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.v1.attention.backend import MultipleOf

        dtype = vllm_config.cache_config.cache_dtype
        if dtype not in names:
            stock(cls, vllm_config, backend_cls)
            return
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
        quantized = [x.get_attn_backend() for x in layers if getattr(x, "kv_cache_dtype", None) == dtype]
        if not quantized or len(quantized) == len(layers):
            return
        backends = {x.get_attn_backend() for x in layers}
        sizes = [[getattr(s, "base", s) for s in b.get_supported_kernel_block_sizes()] for b in backends]
        smallest = MultipleOf(max(min(of_one) for of_one in sizes))
        owner = type("Owner", (quantized[0],), {"get_supported_kernel_block_sizes": staticmethod(lambda: [smallest])})
        stock(cls, vllm_config, owner)

    Platform._align_heterogeneous_kv_block_size = classmethod(align)
    Platform._kvpilot_shares_pages = True


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


def lacks_for_disk() -> str:
    """What a disk below offloaded pages needs and the installed vLLM is not; nothing where it is absent."""
    try:
        here = vllm_version()
    except UnsupportedEngineError:
        return ""
    served = ".".join(map(str, DISK))
    return "" if here == DISK else f"vLLM {served} (here is {version_text()})"
