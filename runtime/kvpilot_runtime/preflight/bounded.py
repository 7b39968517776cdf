"""Preflight check of a bounded cache (`--retention`), before vLLM is imported. The engine repeats the check."""

from kvpilot_formats import formats, models
from kvpilot_formats.arguments import read, rules
from kvpilot_formats.latent import LatentFormat
from kvpilot_runtime.config import options
from kvpilot_runtime.errors import PreflightError, Reason
from kvpilot_runtime.preflight.request import Request
from kvpilot_runtime.vllm_api import compat


def check(
    fmt: formats.Format | LatentFormat, config: models.Architecture | None, request: Request
) -> list[tuple[str, str]]:  # fmt: skip
    """Return warnings as (reason, message). Raise PreflightError if the request's bounded cache is not supported."""
    bound = request.retention
    if bound is None:
        return []

    def refuse(what: str, remedy: str, reason: Reason = "BadArguments") -> PreflightError:
        return PreflightError(reason, f"--retention {bound}: {what} is not supported beside it; {remedy}")

    if lacks := compat.lacks(compat.NEWEST):
        raise PreflightError("BadArguments", f"--retention {bound} needs {lacks}; leave it out, or use that version")
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
    if config is None:
        return []
    if (what := models.unsupported_bounded(config)) is not None:
        raise refuse(what, "leave it out", "ModelUnsupported")
    length = request.max_model_len or config.max_positions
    if length and length <= bound.window:
        return [("RetentionUnused", f"--retention {bound}: no context of {length} tokens leaves the window; the option "
                 "is of no effect")]  # fmt: skip
    return []
