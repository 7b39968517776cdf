"""Fit the static factors of a whole model to texts, with transformers.

The model runs one forward pass over each text. As in an engine that calibrates itself, `kvpilot_kernels.fit.Observed`
fits each layer's factors to the layer's queries, keys (after RoPE) and values.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from kvpilot_kernels.factors import Factors
from kvpilot_kernels.fit import Observed
from kvpilot_runtime.calibration.attention import causal
from kvpilot_runtime.calibration.factors_file import ModelFacts

Progress = Callable[[int, int], None]
"""Callback that receives the number of finished tokens and the total."""


class CalibrateError(ValueError):
    """Error for a model, prompts or options that cannot be used. The message names the fault and the remedy."""


def fit_model(model: Any, pieces: list[torch.Tensor], first: torch.Tensor, facts: ModelFacts,
              progress: Progress | None = None) -> list[Factors]:  # fmt: skip
    """Return the factors of every layer of a transformers causal language model.

    Layers that engines keep in 16 bits, such as those with a sliding window, get factors that change nothing.

    Args:
        pieces: token ids, int64 [tokens] each, at least two tokens.
        first: possible first tokens of prompts, int64 [n]. Each runs alone, at position 0.
    """
    layers = _Layers(facts)
    AttentionInterface.register("kvpilot_calibrate", layers.attend)
    model.set_attn_implementation("kvpilot_calibrate")
    device = model.get_input_embeddings().weight.device
    done, total = 0, sum(len(piece) for piece in pieces)
    with torch.inference_mode():
        for piece in [*pieces, *first[:, None]]:
            model.get_decoder()(piece[None].to(device), use_cache=False)
            done += len(piece)
            if progress:
                progress(min(done, total), total)
    if not layers.seen:
        raise CalibrateError(f"no layer of {type(model).__name__} keeps keys and values; there is nothing to calibrate")
    found = [Factors.identity(facts.kv_heads, facts.head_dim) for _ in range(facts.layers)]
    for number, observed in layers.seen.items():
        try:
            found[number] = observed.factors().to("cpu")
        except ValueError as error:
            raise CalibrateError(f"layer {number}: {error}") from error
    return found


class _Layers:
    """Statistics of a model's layers (`seen`, by the number of the layer), and the attention that collects them."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self.seen: dict[int, Observed] = {}

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute causal attention of one sequence, as transformers calls it, [1, heads, tokens, D] each."""
        shape, layer = (self._facts.kv_heads, self._facts.head_dim), module.layer_idx
        for name, x in (("keys", key), ("values", value)):
            if (x.shape[1], x.shape[3]) != shape:
                raise CalibrateError(
                    f"layer {layer} has {x.shape[1]} heads of {x.shape[3]} elements in its {name}, and config.json "
                    f"says {shape[0]} of {shape[1]}; serve this model without a file"
                )
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        window = options.get("sliding_window") or getattr(module, "sliding_window", None)
        how = float(options["scaling"]), float(options.get("softcap") or 0.0), window, options.get("s_aux")
        if window is None:  # engines keep the other layers in 16 bits
            observed = self.seen.setdefault(layer, Observed(*shape, q.device))
            if len(q) == 1:
                observed.add_first(k)
            else:
                observed.add(q, k, v, *how)
        return causal(q, k, v, *how)[None], None
