"""Parts of a plan for a bounded cache (`kvCache.retention`) and for host memory (`kvCache.offload`)."""

from dataclasses import dataclass, replace

from kvpilot_cli.plan.capacity import Cache
from kvpilot_cli.plan.facts import Model, PlanError
from kvpilot_formats.models import unsupported_bounded


@dataclass(frozen=True, slots=True)
class Bound:
    """Bound on the cache of a sequence, in tokens.

    With `budget` it is HeavyHitters, which keeps that many tokens. Otherwise it is SinksAndWindow, which keeps the
    first `sinks` and the last `window` tokens in whole pages.
    """

    sinks: int | None = None
    window: int | None = None
    budget: int | None = None

    def __str__(self) -> str:
        """Return the policy's name and the tokens that it keeps."""
        if self.budget is not None:
            return f"HeavyHitters, of which {self.budget:,} tokens are kept: first, last, and the heaviest between"
        return f"SinksAndWindow, of which the first {self.sinks:,} and the last {self.window:,} tokens are kept"

    def of(self, layout: Cache) -> Cache:
        """Return the layout with this bound. A bounded cache has no recent window."""
        if self.budget is not None:
            pages = self.budget // layout.block + 1
        else:
            pages = -(-(self.sinks or 0) // layout.block) + -(-(self.window or 0) // layout.block) + 1
        return replace(layout, ring_blocks=0, most_pages=pages)


def check_bound(model: Model) -> None:
    """Raise PlanError for a model whose cache engines cannot bound (docs/retention.md)."""
    if (what := unsupported_bounded(model.architecture)) is not None:
        raise PlanError(
            f"--retention: {what} is not supported with a bounded cache; leave the options of --retention out"
        )


def host_tokens(model: Model, layout: Cache, gpus: int, host_bytes: int) -> int | None:
    """Return how many tokens `host_bytes` hold in whole blocks, for all GPUs of an engine together.

    Return None for models with sliding windows or latents, which vLLM stores differently.
    """
    if model.sliding_layers or model.latent_dim:
        return None
    return host_bytes // (layout.page_bytes * layout.group_layers * gpus) * layout.block
