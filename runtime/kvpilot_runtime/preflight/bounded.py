"""Preflight check of a bounded cache (`--retention`), before vLLM is imported. The engine repeats the check."""

from collections.abc import Callable

from kvpilot_formats import formats, models
from kvpilot_formats.arguments import read, rules
from kvpilot_formats.latent import LatentFormat
from kvpilot_runtime.config import options
from kvpilot_runtime.config.retention import HeavyHitters
from kvpilot_runtime.errors import PreflightError, Reason
from kvpilot_runtime.preflight import machine
from kvpilot_runtime.preflight.memory import BLOCK_TOKENS
from kvpilot_runtime.preflight.request import Request
from kvpilot_runtime.vllm_api import compat


def check(
    fmt: formats.Format | LatentFormat, config: models.Architecture | None, request: Request,
    platform: machine.Platform,
) -> list[tuple[str, str]]:  # fmt: skip
    """Return warnings as (reason, message). Raise PreflightError if the request's bounded cache is not supported."""
    bound = request.retention
    if bound is None:
        return []

    def refuse(what: str, remedy: str, reason: Reason = "BadArguments") -> PreflightError:
        return PreflightError(reason, f"--retention {bound}: {what} is not supported beside it; {remedy}")

    if lacks := compat.lacks(compat.NEWEST):
        raise PreflightError("BadArguments", f"--retention {bound} needs {lacks}; leave it out, or use that version")
    if isinstance(bound, HeavyHitters) and not fmt.ours:
        raise refuse(f"kv-cache dtype {fmt.name!r}", "use a dtype of kvpilot, or SinksAndWindow")
    if isinstance(fmt, LatentFormat):
        raise refuse(f"kv-cache dtype {fmt.name!r}", "leave it out")
    if (found := rules.first_on(read(request.others), rules.BESIDE_BOUNDED)) is not None:
        raise refuse(f"{found[0]} ({found[1]})", "leave one of the two out")
    if skipped := [
        layer for layer in request.skip_layers or () if layer != options.SLIDING
    ]:  # models with sliding-window layers are refused below
        raise refuse(f"--kv-cache-dtype-skip-layers {','.join(skipped)}", "leave one of the two out")
    if request.recent:
        raise refuse(f"--recent-tokens {request.recent} (the recent window)", "leave one of the two out")
    if isinstance(bound, HeavyHitters):
        _heavy(bound, request, BLOCK_TOKENS[platform], refuse)
    if config is None:
        return []
    if (what := models.unsupported_bounded(config)) is not None:
        raise refuse(what, "leave it out", "ModelUnsupported")
    length = request.max_model_len or config.max_positions
    if length and length <= bound.reach:
        what = "outgrows the budget" if isinstance(bound, HeavyHitters) else "leaves the window"
        return [("RetentionUnused", f"--retention {bound}: no context of {length} tokens {what}; the option is of no "
                 "effect")]  # fmt: skip
    return []


def _heavy(
    bound: HeavyHitters, request: Request, usual: int, refuse: Callable[[str, str], PreflightError]
) -> None:  # fmt: skip
    """Refuse settings that heavy hitters do not support.

    Args:
        usual: tokens of a page if the request does not set `--block-size`.
        refuse: function that makes the error, from the unsupported feature and the remedy.
    """
    every = read((*request.others, f"--tensor-parallel-size={request.tensor_parallel}"))
    if (found := rules.first_on(every, rules.BESIDE_HEAVY_HITTERS)) is not None:
        raise refuse(f"{found[0]} ({found[1]})", "leave it out")
    page = request.arguments.count("--block-size")
    page = usual if page == 1 else page
    if bound.budget < bound.least(page):
        raise PreflightError(
            "BadArguments",
            f"--retention {bound}: {bound.sinks} sinks, a window of {bound.window} tokens and one page beside them "
            f"take {bound.least(page)} tokens in pages of {page}; make --retention-budget-tokens at least that, or the "
            "window or --block-size smaller",
        )
