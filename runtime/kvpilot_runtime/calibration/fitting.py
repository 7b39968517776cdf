"""Fit the static factors of a whole model to texts, with transformers.

The model runs one forward and one backward pass over each text. Each layer yields its keys (after RoPE), its values,
and the gradients of the log-likelihood of next tokens with respect to both. The next tokens are drawn from the model's
own distribution. `kvpilot_kernels.fit` turns sums over keys, values and gradients (moments) into factors. An engine
reads the recent window at 8 bits, so a query contributes no gradient for keys and values inside its window.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from kvpilot_kernels.factors import Factors
from kvpilot_kernels.fit import Moments, fit
from kvpilot_kernels.reference.windowed import Sides, windowed
from kvpilot_runtime.calibration.factors_file import ModelFacts

HOOK = "kvpilot_calibrate"
"""Name of our attention function in transformers. Functions of this module register different functions under it."""

_CHUNK = 256
"""Number of tokens whose logits are in memory at once."""

Progress = Callable[[int, int], None]
"""Callback that receives the number of finished tokens and the total."""


class CalibrateError(ValueError):
    """Error for a model, prompts or options that cannot be used. The message names the fault and the remedy."""


def _window(module: Any, options: dict[str, Any]) -> int | None:
    """Return a layer's sliding window in tokens, or None, from the arguments of transformers' attention function."""
    return options.get("sliding_window") or getattr(module, "sliding_window", None)


def _attend(
    module: Any, query: torch.Tensor, pages: Sides, fine: Sides, recent: int, options: dict[str, Any]
) -> tuple[torch.Tensor, None]:
    """Call `windowed` with the shapes and options that transformers gives to an attention function."""
    softcap, window = float(options.get("softcap") or 0.0), _window(module, options)
    out = windowed(query, pages, fine, float(options["scaling"]), recent, softcap=softcap, sliding_window=window)
    return out.transpose(1, 2).contiguous(), None


def _exact(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Compute attention without a recent window for transformers. The query is [sequences, heads, tokens, D]."""
    return _attend(module, query, (key, value), (key, value), 0, options)


def hook() -> str:
    """Register our attention with transformers. Return the name that a model must be loaded with to use it."""
    AttentionInterface.register(HOOK, _exact)
    return HOOK


def _first_keys(model: Any, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the keys of `tokens`, int64 [n], as [n, kv_heads, D] by layer. Each token runs alone, at position 0."""
    seen: dict[int, torch.Tensor] = {}

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        seen[module.layer_idx] = key[:, :, 0]
        return _exact(module, query, key, value, mask, **options)

    AttentionInterface.register(HOOK, attend)
    with torch.inference_mode():
        model.get_decoder()(tokens[:, None], use_cache=False)
    return seen


def fit_model(
    model: Any, pieces: list[torch.Tensor], first: torch.Tensor, facts: ModelFacts, recent: int,
    progress: Progress | None = None,
) -> list[Factors]:  # fmt: skip
    """Return the factors of every layer of a transformers causal language model.

    Layers that engines keep in 16 bits, such as those with a sliding window, get factors that change nothing.

    Args:
        model: model that was loaded with `attn_implementation=hook()`.
        pieces: token ids, int64 [tokens] each.
        first: possible first tokens of prompts, int64 [n].
        recent: tokens of the recent window that will be served.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.eval()
    recorder = _Recorder(facts, recent)
    AttentionInterface.register(HOOK, recorder.attend)
    draw = torch.Generator("cpu").manual_seed(0)
    done, total = 0, sum(piece.numel() for piece in pieces)
    for piece in pieces:
        _backward(model, piece, draw)
        recorder.collect()
        done += piece.numel()
        if progress:
            progress(done, total)
    if not recorder.keys:
        raise CalibrateError(f"no layer of {type(model).__name__} keeps keys and values; there is nothing to calibrate")
    found = [Factors.identity(facts.kv_heads, facts.head_dim) for _ in range(facts.layers)]
    at_zero = _first_keys(model, first.to(model.get_input_embeddings().weight.device))
    for layer in recorder.keys:
        mean = at_zero[layer].float().mean(0)
        found[layer] = Factors(*fit(recorder.keys[layer]), *fit(recorder.values[layer]), mean).to("cpu")
    return found


def _backward(model: Any, piece: torch.Tensor, draw: torch.Generator) -> None:
    """Compute gradients of the log-likelihood of next tokens, which are drawn from the model's own distribution."""
    table = model.get_input_embeddings()
    inputs = table(piece[None].to(table.weight.device)).detach().requires_grad_()
    states = model.get_decoder()(inputs_embeds=inputs, use_cache=False).last_hidden_state[0]
    top = states.detach().requires_grad_()
    for start in range(0, len(top), _CHUNK):
        logs = model.get_output_embeddings()(top[start : start + _CHUNK]).float().log_softmax(-1)
        with torch.no_grad():
            drawn = torch.multinomial(logs.exp().cpu(), 1, generator=draw).to(logs.device)
        logs.gather(1, drawn).sum().backward()
    states.backward(top.grad)


class _Recorder:
    """Recorder of the keys and values of a forward pass. Once their gradients are known, it adds all to the moments."""

    def __init__(self, facts: ModelFacts, recent: int) -> None:
        self._facts, self._recent = facts, recent
        self.keys: dict[int, Moments] = {}
        self.values: dict[int, Moments] = {}
        self._pass: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute attention, as transformers calls it, and keep keys and values, [1, kv_heads, tokens, D] each."""
        shape = (self._facts.kv_heads, self._facts.head_dim)
        for name, x in (("keys", key), ("values", value)):
            if (x.shape[1], x.shape[3]) != shape:
                raise CalibrateError(
                    f"layer {module.layer_idx} has {x.shape[1]} heads of {x.shape[3]} elements in its {name}, and "
                    f"config.json says {shape[0]} of {shape[1]}; serve this model without a file"
                )
        if options.get("s_aux") is not None:
            raise CalibrateError("our formats do not serve attention with sinks of its own; use dtype auto or fp8")
        # Engines keep sliding-window layers in 16 bits, so these layers need no factors.
        if _window(module, options) is not None:
            return _exact(module, query, key, value, mask, **options)
        far_key, far_value = key.clone(), value.clone()
        far_key.retain_grad()
        far_value.retain_grad()
        self._pass.append((module.layer_idx, far_key, far_value))
        return _attend(module, query, (far_key, far_value), (key, value), self._recent, options)

    def collect(self) -> None:
        """Add the keys, values and gradients of the last pass to the moments, and release their memory."""
        for layer, key, value in self._pass:
            for side, x in ((self.keys, key), (self.values, value)):
                moments = side.setdefault(layer, Moments(x.shape[1], x.shape[3], x.device))
                if x.grad is None:
                    raise CalibrateError(f"layer {layer} has no gradient; this model cannot be calibrated")
                # Leave out the key at position 0, which has its own mean (`key_first`).
                past = slice(1 if side is self.keys else 0, None)
                try:
                    moments.add(x.detach()[0].transpose(0, 1)[past], x.grad[0].transpose(0, 1)[past].double().square())
                except ValueError as error:
                    raise CalibrateError(f"layer {layer}: {error}") from error
        self._pass.clear()
