"""Compare how many tokens the same memory holds with different KV-cache dtypes."""

from collections.abc import Sequence
from functools import lru_cache

from kvpilot_formats import dtypes, formats
from kvpilot_formats.untrusted import whole
from kvpilot_operator.state.snapshot import ModelFacts

OWN_BLOCK = 64
"""Tokens per KV block of our formats on a GPU (docs/benchmarks/h200-engine.json, block_size)."""

_KEPT_BITS = 16.0


def smaller(dtype: str, than: str) -> bool:
    """Return True if `dtype` has fewer bits per element than `than`."""
    return dtypes.parse(dtype).bits_per_element() < dtypes.parse(than).bits_per_element()


@lru_cache(maxsize=4096)
def gain(
    from_dtype: str,
    to_dtype: str,
    model: ModelFacts | None = None,
    skip_layers: Sequence[str] = (),
    windows: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Return how many times as many tokens the same memory holds in `to_dtype` as in `from_dtype`.

    The ratio comes from the mean bits per element. It holds for contexts shorter than a model's sliding window. With
    longer contexts the gain is larger. `windows` has the `window_share` of the old and of the new dtype.
    """
    before = bits_per_element(from_dtype, model, skip_layers, windows[0])
    return before / bits_per_element(to_dtype, model, skip_layers, windows[1])


def window_share(dtype: str, model: ModelFacts | None, recent_tokens: int, held: int | None) -> float:
    """Return the residual pages of a sequence's recent window, divided by the KV pages of its `held` tokens.

    Return 0 if `held` is None, or if the dtype has no residuals.
    """
    stored = dtypes.parse(dtype)
    head_dim = 128 if model is None else model.head_dim
    if held is None or not isinstance(stored, formats.Format) or formats.stored_dim(head_dim) is None:
        return 0.0
    blocks = min(stored.recent_blocks(recent_tokens, OWN_BLOCK), -(-held // OWN_BLOCK))
    return stored.residual_pages(head_dim, OWN_BLOCK) * blocks * OWN_BLOCK / max(held, OWN_BLOCK)


def bits_per_element(
    dtype: str, model: ModelFacts | None = None, skip_layers: Sequence[str] = (), window: float = 0.0
) -> float:
    """Return the mean bits of a stored element over all layers, with scales and zero points.

    Layers in `skip_layers` count with 16 bits. `window` is the `window_share` to add.
    """
    stored = dtypes.parse(dtype)
    supported = model is not None and (not stored.ours or formats.stored_dim(model.head_dim)) and model.head_dim > 0
    bits = stored.bits_per_element(model.head_dim) if model is not None and supported else stored.bits_per_element()
    bits *= 1 + window
    if model is None or stored.bits_per_element() >= _KEPT_BITS or model.layers <= 0:
        return bits
    share = kept_layers(model, skip_layers) / model.layers
    return share * _KEPT_BITS + (1 - share) * bits


def kept_layers(model: ModelFacts, skip_layers: Sequence[str]) -> int:
    """Count the layers that `skip_layers` keeps in 16 bits: by layer number, or all those with a sliding window."""
    numbers = [whole(layer, model.layers - 1) for layer in skip_layers]
    named = sum(number is not None for number in numbers)
    return min(model.layers, named + (model.window_layers if "sliding_window" in skip_layers else 0))
