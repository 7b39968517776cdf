"""Supported versions of vLLM, and the code that depends on the version."""

import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from kvpilot_runtime.errors import UnsupportedEngineError

PINNED = (0, 32)
"""vLLM's version in `requirements.lock`, which error messages recommend.

KV connectors (`config.connectors`) require it: vLLM changes them in every version.
"""

OLDEST, NEWEST = PINNED, (0, 33)
"""Range of supported versions. Older ones are refused. Newer ones serve our dtypes with a warning."""

RUN_ON = {"cpu": (PINNED,), "cuda": (PINNED, NEWEST)}
"""Tested versions, by platform: on a CPU with tests/runtime, on a GPU with benchmarks/accuracy/gpu_versions.py."""

_BUILD = (10**6, 0)


def shown(version: tuple[int, int]) -> str:
    """Return a version as text, such as 0.32."""
    return ".".join(map(str, version))


ADVISED = shown(PINNED)


def version_text() -> str:
    """Return the version of the installed vLLM; raise UnsupportedEngineError if there is none."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedEngineError(f"vllm is not installed; install vllm {ADVISED} beside kvpilot") from None


def vllm_version() -> tuple[int, int]:
    """Return major and minor version of the installed vLLM. A build without a version number counts as the newest."""
    found = re.match(r"(\d+)\.(\d+)", version_text())
    return (int(found[1]), int(found[2])) if found else _BUILD


def was_run_on(platform: str) -> bool:
    """Return True if kvpilot is tested with the installed vLLM on this platform, `cpu` or `cuda`."""
    return vllm_version() in RUN_ON.get(platform, ())


def unsupported_on(platform: str) -> str:
    """Return a message with installed version, tested versions and remedy; empty if the installed one is tested."""
    if was_run_on(platform):
        return ""
    names = {"cpu": "a CPU", "cuda": "a GPU"}
    known = "; ".join(f"{', '.join(map(shown, ran))} on {names[where]}" for where, ran in RUN_ON.items())
    return (
        f"vllm {version_text()} is not supported on {names[platform]}; supported are {known}; use a runtime image with "
        f"vllm {ADVISED}"
    )


def lacks(*, pinned: bool = False) -> str:
    """Return the accepted versions of vLLM as text if the installed version is not one of them, else an empty string.

    `OLDEST` and all newer versions are accepted, with `pinned` only `PINNED`. If vLLM is not installed, also return an
    empty string.
    """
    try:
        if OLDEST <= vllm_version() <= (PINNED if pinned else _BUILD):
            return ""
    except UnsupportedEngineError:
        return ""
    until = "" if pinned else " or newer"
    return f"vLLM {shown(OLDEST)}{until} (here is {version_text()})"


def kept_graphs(platform: str) -> dict[str, str]:
    """Return environment variables that let vLLM find its compiled code at the next start.

    On a CPU, vLLM 0.32 cannot load its own ahead-of-time archives, and would compile again at every start. So the
    variables turn these archives off.
    """
    return {"VLLM_USE_AOT_COMPILE": "0"} if platform == "cpu" else {}


def make_known(names: tuple[str, ...], asked: Callable[[str], None]) -> None:
    """Make `names` valid values of `--kv-cache-dtype`. vLLM then calls `asked` with the name that an engine uses.

    This changes only data of vLLM: in 0.33 a registry of dtypes, in 0.32 a `Literal` type and the validators that
    pydantic has compiled from it. A second call changes nothing.
    """
    from vllm.config import cache

    if hasattr(cache, "register_kv_cache_dtype"):
        _register_handlers(names, asked)
    else:
        _extend_literal(names, asked)


def store_as_bytes(names: tuple[str, ...]) -> None:
    """Let vLLM store pages of these dtypes as bytes. Call this before vLLM creates a layer with such a dtype."""
    import torch
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    STR_DTYPE_TO_TORCH_DTYPE.update(dict.fromkeys(names, torch.uint8))


def _register_handlers(names: tuple[str, ...], asked: Callable[[str], None]) -> None:
    """Register a handler class for each name with the registry of 0.33."""
    import torch
    from vllm.config import cache
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Packed:
        """Handler of a dtype whose pages vLLM stores as bytes, and which vLLM's generic kernels cannot read.

        Its quantization mode is NONE, which 0.32 uses for unknown names. `KVQuantMode.CUSTOM` would fit better, but
        vLLM confuses it with another mode that has the same value.
        """

        name: str
        told = False

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            """Return NONE. Also call `asked`, because vLLM asks only the engine's own dtype for its mode."""
            if not self.told:
                asked(self.name)
                self.told = True
            return KVQuantMode.NONE

    for name in names:
        if cache.get_kv_cache_dtype_handler(name) is None:
            cache.register_kv_cache_dtype(name)(type(name, (Packed,), {"name": name}))


def _extend_literal(names: tuple[str, ...], asked: Callable[[str], None]) -> None:
    """Add values to the `Literal` type of vLLM 0.32 in place, so that modules that have imported it see them."""
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
    # Both configurations hold a validator that was compiled from the old `Literal`, so compile it again. Restore the
    # field's annotation afterwards, because vLLM's command line reads it.
    field: Any = CacheConfig.__dataclass_fields__["cache_dtype"]
    declared = field.type
    field.type = Annotated[declared, AfterValidator(chosen)]
    try:
        rebuild_dataclass(CacheConfig, force=True)
    finally:
        field.type = declared
    rebuild_dataclass(VllmConfig, force=True)


def backend_class(dtype: str) -> str:
    """Return the name of a dtype's backend class, which is the same in each platform's module."""
    return f"{dtype.upper()}Backend"


LAYER_OUTERMOST, BLOCK_OUTERMOST = "LBHNC", ("BHLNC", "BLHNC")
"""vLLM's names of the supported layouts: layers one after the other, or all layers of a block together.

The letters are the dimensions, outermost first: L layers, B blocks, H heads, N tokens, C the bytes of a token.
"""


def page_layouts() -> tuple[Any, ...]:
    """Return vLLM's layouts in which each (block, KV head) is one page. vLLM uses the first layout by default."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    names = (LAYER_OUTERMOST, *BLOCK_OUTERMOST)
    return tuple(KVCacheLayout[name] for name in names if name in KVCacheLayout.__members__)


@dataclass(frozen=True)
class Drafter:
    """Draft model of a runner.

    Attributes:
        model: the draft model.
        reads_states: True if the draft model reads hidden states of the target model.
        combines_states: True if the draft model reads hidden states from several layers.
        uses_mrope: True if the draft model's positions have three dimensions (M-RoPE).
    """

    model: Any
    reads_states: bool
    combines_states: bool
    uses_mrope: bool


def drafter(runner: Any) -> Drafter:
    """Return the draft model of a worker's model runner, which may be of vLLM's older class or of V2 (used on GPUs)."""
    if (old := getattr(runner, "drafter", None)) is not None:
        return Drafter(old.model, old.pass_hidden_states_to_model, old.eagle3_use_aux_hidden_state, old.uses_mrope)
    new = runner.speculator
    return Drafter(new.model, new.method != "draft_model", runner.use_aux_hidden_state_outputs, uses_mrope=False)
