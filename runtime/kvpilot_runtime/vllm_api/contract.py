"""Check at start that the installed vLLM has all parts that the plugin uses (`vllm_parts`).

A missing part disables only the features that need it. Models with vLLM's own dtypes are not affected. Once an engine
has its cache, `page_check` does the last check: it writes a page and reads it back.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable

from kvpilot_formats import latent
from kvpilot_runtime.errors import UnsupportedEngineError
from kvpilot_runtime.vllm_api import compat
from kvpilot_runtime.vllm_api.vllm_parts import PARTS, Broken, Feature

TOLD = "KVPILOT_VERSION_TOLD"
"""Environment variable that keeps vLLM's other processes from repeating the warnings of the first one."""

log = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


@functools.cache
def broken(platform: str) -> tuple[Broken, ...]:
    """Return the parts of the installed vLLM, on `cpu` or `cuda`, that differ from what the plugin needs."""
    looked_at = ((part, part.wrong()) for part in PARTS if part.platform in ("", platform))
    return tuple(Broken(part, why) for part, why in looked_at if why)


def has(feature: Feature) -> bool:
    """Return True if this vLLM has all parts of a feature, on every platform."""
    return not any(one.part.feature is feature for one in broken(""))


def tell(found: Iterable[Broken], platform: str) -> None:
    """Warn of a version that is not supported on this platform, `cpu` or `cuda`, and of parts that differ.

    Only the first of vLLM's processes warns.
    """
    if TOLD in os.environ:
        return
    os.environ[TOLD] = "1"
    # Report the parts of other features only when somebody uses these features.
    quiet = (Feature.WINDOW, Feature.LATENTS, Feature.BOUND, Feature.HEAVY, Feature.HOST, Feature.IMAGES)
    costly = [b for b in found if b.part.feature not in quiet]
    if unsupported := compat.unsupported_on(platform):
        log.warning("%s (of the parts that kvpilot uses, %s)", unsupported,
                    f"{len(costly)} differ" if costly else "none differs")  # fmt: skip
    for one in costly:
        other = "" if one.part.feature is Feature.DRAIN else "--kv-cache-dtype auto, or "
        log.error("vllm %s: %s; %s: use %svllm %s", compat.version_text(), one, one.part.feature.value, other,
                  compat.ADVISED)  # fmt: skip


def refuse(dtype: str, found: Iterable[Broken], skipping: bool) -> None:
    """Refuse a layer in one of our dtypes if this vLLM is too old or differs in a part that the layer needs.

    Args:
        skipping: there are layers that stay in 16 bits.
    """
    if lacks := compat.too_old():
        raise UnsupportedEngineError(
            f"kv-cache dtype {dtype!r} needs {lacks}; use --kv-cache-dtype auto, or a runtime image with vllm "
            f"{compat.ADVISED}"
        )
    needed = {Feature.NAMES, Feature.LAYERS, *([Feature.SKIPPED] if skipping else [])}
    needed |= {Feature.LATENTS} if dtype in latent.names() else set()
    why = [str(one) for one in found if one.part.feature in needed]
    if why:
        raise UnsupportedEngineError(
            f"kv-cache dtype {dtype!r} cannot be served by vllm {compat.version_text()}: {'; '.join(why)}; use "
            f"--kv-cache-dtype auto, or a runtime image with vllm {compat.ADVISED}"
        )


def refuse_bound(bound: str, found: Iterable[Broken], heavy: bool = False) -> None:
    """Refuse a bounded cache that this vLLM cannot serve; `heavy` is True for heavy hitters."""
    if lacks := compat.lacks_for_bounds():
        raise UnsupportedEngineError(
            f"--retention {bound} needs {lacks}; leave it out, or use a runtime image with vllm {compat.ADVISED}"
        )
    if why := [str(one) for one in found if one.part.feature in (Feature.BOUND, *[Feature.HEAVY] * heavy)]:
        raise UnsupportedEngineError(
            f"--retention {bound} cannot be served by vllm {compat.version_text()}, whose scheduler cannot free chosen "
            f"pages: {'; '.join(why)}; leave it out, or use a runtime image with vllm {compat.ADVISED}"
        )
