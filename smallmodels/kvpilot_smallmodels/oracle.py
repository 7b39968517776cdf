"""Oracle for an engine's answers: the same weights and quantization in plain transformers, without pages or batches.

One causal pass over prompt and answer gives the logits of each step. The *codec* quantizes all keys and values as whole
tensors, and reads them back. An engine computes the same values token by token from its pages, because every token is
quantized on its own. But for this, prefill must also read a chunk's own tokens from pages (KVPILOT_PREFILL_FROM_PAGES).

With a recent window the oracle needs a record of the engine's steps: which tokens each query read with residuals.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpilot_formats import formats, latent
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.latent.reference import round_trip as latent_round_trip
from kvpilot_kernels.reference.attention import round_trip

_NAME = "kvpilot_oracle"
SLACK = 1e-3
"""Largest change of a logit by rounding if all quantized values stay the same. Logits have a spread of 3.4."""


@dataclass(frozen=True)
class Picture:
    """Image in a prompt.

    `pixels` has the form that the model's processor returns. `spans` are ranges of tokens [begin, end) that attend to
    each other.
    """

    pixels: torch.Tensor
    spans: tuple[tuple[int, int], ...]


class Oracle:
    """Model in float32, whose full-attention layers attend to keys and values after a round trip through the codec.

    Args:
        folder: the model.
        dtype: one of our formats, or `auto` for no codec. Latent formats are for DeepSeek V2's attention.
        factors: a calibration, layer by layer.
        seen: function that returns a mask for a number of tokens, bool [queries, keys], True if the query attends to
            the key. A query must attend to itself. None if queries attend to all earlier keys.
    """

    def __init__(
        self, folder: Path, dtype: str, factors: Sequence[Factors] | None = None,
        seen: Callable[[int], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        # Use one thread, like the engine under test: another order of sums would round some values to other codes.
        torch.set_num_threads(1)
        self._factors = factors
        self._latent = latent.parse(dtype) if dtype in latent.names() else None
        self._format = None if self._latent or dtype == "auto" else formats.parse(dtype)
        self._random, self._jitter = torch.Generator().manual_seed(0), 0.0
        self._misread: int | None = None
        self._seen = seen
        self._fine: torch.Tensor | None = None
        ALL_ATTENTION_FUNCTIONS.register(_NAME, self._attention)
        self._spans: tuple[tuple[int, int], ...] = ()
        sees = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
        self._model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(
            folder, dtype=torch.float32,
            attn_implementation={"text_config": _NAME, "vision_config": "eager"} if sees else _NAME,
        )  # fmt: skip
        if self._latent is not None:
            for layer in self._model.model.layers:
                layer.self_attn.expand_kv = self._read_back(layer.self_attn.expand_kv, self._latent)

    @torch.inference_mode()
    def shortfalls(
        self, prompt: list[int], answer: list[int], *, jitter: float = 0.0, misread: int | None = None,
        fine: torch.Tensor | None = None, picture: Picture | None = None,
    ) -> list[float]:  # fmt: skip
        """Return how far each answer token's logit is below the best logit of its step; 0 if it is the best.

        Args:
            jitter: relative size of random changes of values before they are quantized. They make some values round to
                a neighbouring code, as sums in another order do.
            misread: token at which to simulate a paging fault: in place of the 16 tokens from this one on, layers read
                the 16 tokens before it.
            fine: keys that the engine read with residuals, bool [queries, keys] for the tokens of prompt and answer.
                None for no key.
            picture: the prompt's image.
        """
        logits = self._logits(prompt, answer, jitter, misread, fine, picture)
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        below: list[float] = (logits.amax(1) - chosen).tolist()
        return below

    @torch.inference_mode()
    def predictions(
        self, prompt: list[int], answer: list[int], *, jitter: float = 0.0, misread: int | None = None
    ) -> torch.Tensor:
        """Return the log-probabilities at each answer token, float64 [tokens, vocabulary], without a recent window.

        `jitter` and `misread` mean the same as in `shortfalls`.
        """
        return self._logits(prompt, answer, jitter, misread).log_softmax(-1)

    def logprobs(self, prompt: list[int], answer: list[int]) -> list[float]:
        """Return the log-probability of each token of an answer, without a recent window."""
        found = self.predictions(prompt, answer).gather(1, torch.tensor(answer)[:, None])
        logprobs: list[float] = found[:, 0].tolist()
        return logprobs

    @torch.inference_mode()
    def best(self, prompt: list[int], count: int) -> list[tuple[int, float]]:
        """Return the `count` likeliest next tokens and their log-probabilities, best first, without a recent window."""
        values, tokens = self._logits(prompt, [0])[-1].log_softmax(-1).topk(count)
        return list(zip(tokens.tolist(), values.tolist(), strict=True))

    def _logits(
        self, prompt: list[int], answer: list[int], jitter: float = 0.0, misread: int | None = None,
        fine: torch.Tensor | None = None, picture: Picture | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the logits that predict each answer token, float64 [tokens, vocabulary]."""
        self._jitter, self._misread, self._spans = jitter, misread, picture.spans if picture else ()
        ALL_ATTENTION_FUNCTIONS.register(_NAME, self._attention)
        tokens = torch.tensor([prompt + answer[:-1]])
        self._fine = None if fine is None else fine[: tokens.shape[1], : tokens.shape[1]]
        # Count positions from 0, as vLLM does. PaliGemma's default of 1 would change the codes of keys.
        places = torch.arange(tokens.shape[1])[None]
        shown = {"pixel_values": picture.pixels, "position_ids": places} if picture else {}
        logits: torch.Tensor = self._model(tokens, use_cache=False, logits_to_keep=len(answer), **shown).logits[0]
        return logits.double()

    def sound(
        self, prompt: list[int], answer: list[int], *, misread: int | None = None, rounds: int = 100,
        fine: torch.Tensor | None = None, judged: slice = slice(None), picture: Picture | None = None,
    ) -> bool:  # fmt: skip
        """Return True if each judged answer token has a logit at most `SLACK` below the best one of its step.

        A value between two codes may round to either one, depending on the order of a sum, which differs between
        machines. So if the exact pass disagrees, repeat it with random jitter, `rounds` times for each of three
        strengths. Float32 sums differ by at most 1e-6 of a value after two layers of Llama, and by 2e-5 after six
        layers of Gemma 3. The largest strength is five times 2e-5.

        In a test, four rounds accepted all 40 correct answers that rounding had changed. Ten rounds accepted none of 36
        answers with a misread block.
        """
        jitters = (0.0, *(1e-6, 1e-5, 1e-4) * rounds)
        how: dict[str, Any] = {"misread": misread, "fine": fine, "picture": picture}
        draws = (self.shortfalls(prompt, answer, jitter=jitter, **how) for jitter in jitters)
        return any(max(below[judged]) <= SLACK for below in draws)

    def _attention(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *, scaling: float,
        sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Compute causal attention from [1, heads, tokens, D] to [1, tokens, heads, D].

        The arguments are those of transformers: `softcap` caps scores, `s_aux` [heads] are sinks.
        """
        window = sliding_window or getattr(layer, "sliding_window", None)
        chunk = _chunk_of(layer)
        if self._format is not None and window is None:
            factors = self._factors[layer.layer_idx] if self._factors else None
            codec = self._format
            moved = [(side, self._moved(x).transpose(1, 2)) for side, x in (("key", key), ("value", value))]

            def read(recent: bool) -> Iterator[torch.Tensor]:
                return (round_trip(x, codec, side, factors, recent).transpose(1, 2).float() for side, x in moved)

            key, value = read(recent=False)
            if self._fine is not None and self._fine.any():
                if softcap is not None or s_aux is not None or chunk:
                    raise ValueError(
                        "the oracle reads no residuals of models with soft caps, sinks or chunks; give no fine keys"
                    )
                fine_key, fine_value = read(recent=True)
                return _with_window(query, (key, value), (fine_key, fine_value), self._fine, scaling), None
        if (at := self._misread) is not None:
            key, value = (x.index_copy(2, torch.arange(at, at + 16), x[:, :, at - 16 : at]) for x in (key, value))
        far = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])[None, :]
        seen = (far >= 0) & (far < (window or far.numel() + 1))
        if self._seen is not None:
            seen &= self._seen(query.shape[2])
        for begin, end in self._spans:
            seen[begin:end, begin:end] = True
        if chunk:
            place = torch.arange(query.shape[2]) // chunk
            seen &= place[:, None] == place[None, :]
        if softcap is not None or s_aux is not None:
            return _plain(query, key, value, seen, scaling, softcap, s_aux).transpose(1, 2), None
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    def _read_back(self, expand: Callable[..., Any], codec: latent.LatentFormat) -> Callable[..., Any]:
        """Wrap `expand`, so that it computes keys and values from entries that have been through the codec."""

        def from_codec(kv: torch.Tensor, rope: torch.Tensor) -> Any:
            back = latent_round_trip(self._moved(torch.cat([kv, rope], -1)), codec).float()
            return expand(back[..., : kv.shape[-1]], back[..., kv.shape[-1] :])

        return from_codec

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        return x + x * torch.randn(x.shape, generator=self._random) * self._jitter if self._jitter else x


def _chunk_of(layer: Any) -> int:
    """Return the chunk length of a layer with chunked attention (Llama 4); 0 for other layers."""
    config = layer.config
    chunked = (getattr(config, "layer_types", None) or {layer.layer_idx: ""})[layer.layer_idx] == "chunked_attention"
    return int(config.attention_chunk_size) if chunked else 0


def _with_window(
    query: torch.Tensor, plain: tuple[torch.Tensor, torch.Tensor], refined: tuple[torch.Tensor, torch.Tensor],
    fine: torch.Tensor, scaling: float,
) -> torch.Tensor:  # fmt: skip
    """Compute causal attention that reads some keys and values with residuals.

    Args:
        plain, refined: keys and values without and with their residuals, each [1, kv_heads, tokens, D].
        fine: bool [queries, keys], True for keys to read with residuals.
    """
    repeat = query.shape[1] // plain[0].shape[1]
    (key, value), (near_key, near_value) = ([x.repeat_interleave(repeat, 1) for x in pair] for pair in (plain, refined))
    scores = torch.where(fine, query @ near_key.transpose(2, 3), query @ key.transpose(2, 3)) * scaling
    past = torch.ones(scores.shape[-2:], dtype=torch.bool).tril_()
    p = scores.masked_fill(~past, -torch.inf).softmax(-1)
    return ((p * fine) @ near_value + (p * ~fine) @ value).transpose(1, 2)


def _plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scaling: float,
    softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Compute attention from its definition, [1, heads, tokens, D] in and out.

    Args:
        seen: bool [queries, keys], True if the query attends to the key.
        scaling: factor on scores.
        softcap: cap on scores, or None.
        sinks: [heads] logit that takes part in the softmax but has no value, or None.
    """
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    top = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        top = torch.cat([top, sinks.to(top)[None, :, None, None].expand(1, -1, top.shape[2], 1)], -1)
    return top.softmax(-1)[..., : key.shape[2]] @ value
