"""Supported versions of vLLM, and everything that differs between them.

0.32 has a closed `Literal` of KV-cache dtypes, and 0.33 has a registry for them.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from kvpilot_runtime.errors import UnsupportedEngineError

PINNED = (0, 32)
"""Version in `requirements.lock`. Error messages recommend it.

Connectors (`config.connectors`) and tiers below host memory were run only with this version, because both change from
version to version.
"""

OLDEST, NEWEST = PINNED, (0, 33)
"""Range of supported versions. Older ones are refused. Newer ones are refused only for bounded caches."""

RUN_ON = {"cpu": (PINNED,), "cuda": (PINNED, NEWEST)}
"""Versions that kvpilot was run with: on a CPU by tests/runtime, on a GPU by benchmarks/accuracy/gpu_versions.py."""

_BUILD = (10**6, 0)


def shown(version: tuple[int, int]) -> str:
    """Format a version as users know it."""
    return ".".join(map(str, version))


ADVISED = shown(PINNED)


def version_text() -> str:
    """Return the version that the installed vLLM states."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedEngineError(f"vllm is not installed; install vllm {ADVISED} beside kvpilot") from None


def vllm_version() -> tuple[int, int]:
    """Return major and minor version of the installed vLLM. A build without a version number counts as the newest."""
    found = re.match(r"(\d+)\.(\d+)", version_text())
    return (int(found[1]), int(found[2])) if found else _BUILD


def was_run_on(platform: str) -> bool:
    """Return True if kvpilot was run with the installed vLLM on `cpu` or `cuda`."""
    return vllm_version() in RUN_ON.get(platform, ())


def unsupported_on(platform: str) -> str:
    """Name the installed version, the supported ones and the remedy. Return nothing for a supported version."""
    if was_run_on(platform):
        return ""
    names = {"cpu": "a CPU", "cuda": "a GPU"}
    known = "; ".join(f"{', '.join(map(shown, ran))} on {names[where]}" for where, ran in RUN_ON.items())
    return (
        f"vllm {version_text()} is not supported on {names[platform]}; supported are {known}; use a runtime image with "
        f"vllm {ADVISED}"
    )


def lacks_for_bounds() -> str:
    """Return the versions that serve bounded caches, unless the installed one is among them."""
    return _lacks(NEWEST)


def lacks_for_pinned() -> str:
    """Return the version that serves disks and connectors, unless it is the installed one."""
    return _lacks(PINNED)


def too_old() -> str:
    """Return the oldest supported version if the installed one is older."""
    return _lacks(_BUILD)


def _lacks(newest: tuple[int, int]) -> str:
    """Return the versions from `OLDEST` to `newest` unless the installed vLLM is one of them, or absent."""
    try:
        if OLDEST <= vllm_version() <= newest:
            return ""
    except UnsupportedEngineError:
        return ""
    until = "" if newest == OLDEST else " or newer" if newest == _BUILD else f" to {shown(newest)}"
    return f"vLLM {shown(OLDEST)}{until} (here is {version_text()})"


def kept_graphs(platform: str) -> dict[str, str]:
    """Return environment variables with which vLLM finds its compiled code at the next start.

    On a CPU, 0.32 cannot load its ahead-of-time archives, so it would trace and save again at every start.
    """
    return {"VLLM_USE_AOT_COMPILE": "0"} if platform == "cpu" else {}


def make_known(names: tuple[str, ...], asked: Callable[[str], None]) -> None:
    """Make `names` valid values of `--kv-cache-dtype`. Call `asked` with the name that an engine uses.

    This changes only vLLM's data. 0.33 has a registry of dtypes. 0.32 has a list of names, and validators that pydantic
    compiled from the list. A second call changes nothing.
    """
    from vllm.config import cache

    if hasattr(cache, "register_kv_cache_dtype"):
        _register_handlers(names, asked)
    else:
        _extend_literal(names, asked)


def store_as_bytes(names: tuple[str, ...]) -> None:
    """Tell vLLM that pages of these dtypes are bytes. Call this before a layer with such a dtype is made."""
    import torch
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    STR_DTYPE_TO_TORCH_DTYPE.update(dict.fromkeys(names, torch.uint8))


def _register_handlers(names: tuple[str, ...], asked: Callable[[str], None]) -> None:
    """Register each name with the registry of 0.33, which decorates a class."""
    import torch
    from vllm.config import cache
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Packed:
        """Handler of a dtype that is stored in bytes and that vLLM's generic kernels do not read.

        `KVQuantMode.CUSTOM` would fit, but its value equals that of another format's mode, so vLLM mistakes one for the
        other. 0.32 uses NONE for a name that it does not know.
        """

        name: str
        told = False

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            """Return NONE, and report the dtype as used, because vLLM calls this only for the dtype of its engine."""
            if not self.told:
                asked(self.name)
                self.told = True
            return KVQuantMode.NONE

    for name in names:
        if cache.get_kv_cache_dtype_handler(name) is None:
            cache.register_kv_cache_dtype(name)(type(name, (Packed,), {"name": name}))


def _extend_literal(names: tuple[str, ...], asked: Callable[[str], None]) -> None:
    """Add values to the closed `Literal` of 0.32 in place, because modules that imported it must see them."""
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
    # Both configurations hold a validator that was compiled from the old list, so compile it again. vLLM's command line
    # reads the type of the field, so remove the annotation right after that.
    field: Any = CacheConfig.__dataclass_fields__["cache_dtype"]
    declared = field.type
    field.type = Annotated[declared, AfterValidator(chosen)]
    try:
        rebuild_dataclass(CacheConfig, force=True)
    finally:
        field.type = declared
    rebuild_dataclass(VllmConfig, force=True)


def backend_class(dtype: str) -> str:
    """Return the name of the backend class of one of our dtypes, in the module of its platform."""
    return f"{dtype.upper()}Backend"


LAYER_OUTERMOST, BLOCK_OUTERMOST = "LBHNC", ("BHLNC", "BLHNC")
"""vLLM's names of the layouts that our pages support: each layer by itself, and all layers of a block together.

In the names, L is layers, B blocks, H heads, N tokens, and C the bytes of a token.
"""


def page_layouts() -> tuple[Any, ...]:
    """Return vLLM's layouts in which a head's tokens of a block form one page. vLLM takes the first one."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    names = (LAYER_OUTERMOST, *BLOCK_OUTERMOST)
    return tuple(KVCacheLayout[name] for name in names if name in KVCacheLayout.__members__)


@dataclass(frozen=True)
class Drafter:
    """Draft model of a runner.

    Attributes:
        reads_states: True if it takes hidden states of the served model. combines_states: True if it takes them from
            several layers.
        uses_mrope: True if its positions have three dimensions, like those of the served model.
    """

    model: Any
    reads_states: bool
    combines_states: bool
    uses_mrope: bool


def drafter(runner: Any) -> Drafter:
    """Return the draft model of a worker's runner. vLLM has two kinds of runners; GPUs use V2."""
    if (old := getattr(runner, "drafter", None)) is not None:
        return Drafter(old.model, old.pass_hidden_states_to_model, old.eagle3_use_aux_hidden_state, old.uses_mrope)
    new = runner.speculator
    return Drafter(new.model, new.method != "draft_model", runner.use_aux_hidden_state_outputs, uses_mrope=False)
