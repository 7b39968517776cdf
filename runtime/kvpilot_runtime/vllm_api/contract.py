"""What the plugin stands on in vLLM (`vllm_parts`), looked at when it starts: a version that has it all is served.

What is missing costs what needs it and nothing else: a model in vLLM's own dtypes never asks. `page_check` adds the
last part, a page that is written and read back, once an engine has its cache.
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
"""Environment variable by which the first of vLLM's processes tells the others that it has warned already."""

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say


@functools.cache
def broken(platform: str) -> tuple[Broken, ...]:
    """The parts of the installed vLLM, on `cpu` or `cuda`, that are not as they should be."""
    looked_at = ((part, part.wrong()) for part in PARTS if part.platform in ("", platform))
    return tuple(Broken(part, why) for part, why in looked_at if why)


def has_rings() -> bool:
    """Whether this vLLM can give a request pages that stay out of prefix caching (from 0.30 on)."""
    return not any(one.part.feature is Feature.WINDOW for one in broken(""))


def has_images() -> bool:
    """Whether this vLLM says which tokens are an image's that attend to each other both ways."""
    return not any(one.part.feature is Feature.IMAGES for one in broken(""))


def tell(found: Iterable[Broken], platform: str) -> None:
    """Warn of a version that was not run on this platform, `cpu` or `cuda`, and of what is not as it should be.

    The first of vLLM's processes does.
    """
    if TOLD in os.environ:
        return
    os.environ[TOLD] = "1"
    text = compat.version_text()
    # Of a window its own warning speaks, of the others whoever asks for them; and no probe fails.
    quiet = (Feature.WINDOW, Feature.LATENTS, Feature.BOUND, Feature.HEAVY, Feature.HOST, Feature.IMAGES)
    costly = [b for b in found if b.part.feature not in quiet]
    if tried := compat.how_tried(platform):
        log.warning("vllm %s %s; of what kvpilot uses of it, %s", text, tried,
                    f"{len(costly)} parts are not as they were" if costly else "all is as it was")  # fmt: skip
    for one in costly:
        other = "" if one.part.feature is Feature.DRAIN else "--kv-cache-dtype auto, or "
        log.error("vllm %s: %s; %s: use %svllm %s", text, one, one.part.feature.value, other, compat.ADVISED)


def refuse(dtype: str, found: Iterable[Broken], skipping: bool) -> None:
    """Refuse a layer in a dtype of ours for what is not as it should be.

    Args:
        skipping: there are layers that stay in 16 bits.

    Raises:
        UnsupportedEngineError: a part that such layers need; it names all of them.
    """
    needed = {Feature.NAMES, Feature.LAYERS, *([Feature.SKIPPED] if skipping else [])}
    needed |= {Feature.LATENTS} if dtype in latent.names() else set()
    why = [str(one) for one in found if one.part.feature in needed]
    if why:
        raise UnsupportedEngineError(
            f"kv-cache dtype {dtype!r} cannot be served by vllm {compat.version_text()}: {'; '.join(why)}; use "
            f"--kv-cache-dtype auto, or a runtime image with vllm {compat.ADVISED}"
        )


def refuse_bound(bound: str, found: Iterable[Broken], heavy: bool = False) -> None:
    """Refuse a cache with a bound for what is not as it should be; `heavy`: one of heavy hitters.

    Raises:
        UnsupportedEngineError: this version was not run with one; or a part that frees pages is missing, by name.
    """
    if lacks := compat.lacks_for_bounds():
        raise UnsupportedEngineError(
            f"--retention {bound} needs {lacks}; leave it out, or use a runtime image with vllm {compat.ADVISED}"
        )
    if why := [str(one) for one in found if one.part.feature in (Feature.BOUND, *[Feature.HEAVY] * heavy)]:
        raise UnsupportedEngineError(
            f"--retention {bound} cannot be served by vllm {compat.version_text()}, whose scheduler cannot be told "
            f"which pages to free: {'; '.join(why)}; leave it out, or use a runtime image with vllm {compat.ADVISED}"
        )
