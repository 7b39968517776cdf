"""`kvpilot calibrate MODEL --prompts FILE`: fit static factors to a model and write them to a calibration file.

The model reads the texts once, forwards and backwards. At each layer its keys (after RoPE), its values, and the
gradients of the log-likelihood with respect to both, at next tokens drawn from the model itself, are added to the
moments that `kvpilot_kernels.fit` turns into factors. Queries that read a key or value in the recent window, at 8 bits,
give it no gradient. Sequences must be as long as the contexts that will be served: RoPE turns a channel's mean with the
position, so a mean found on short texts is wrong, and harmful, far beyond them.

Some of the text is held out: on it the factors are compared with those that an engine finds by itself
(`kvpilot_runtime.held_out`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from kvpilot_kernels import formats
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.fit import Moments, fit
from kvpilot_kernels.reference.windowed import windowed
from kvpilot_runtime import calibration, held_out
from kvpilot_runtime.calibration import ModelFacts
from kvpilot_runtime.calibration_text import LONGEST, beginnings, lone, text_ids

DTYPE = "k4v4"
"""The KV-cache dtype whose recent window factors are fitted to, unless another one is named."""

_HOOK = "kvpilot_calibrate"
_CHUNK = 256  # tokens whose logits are held at once

Progress = Callable[[int, int], None]
"""Called with the tokens done and the tokens in all."""


class CalibrateError(ValueError):
    """A model or prompts that cannot be calibrated; the message says what and what to do instead."""


def read_prompts(file: Path) -> list[str]:
    """The texts of a prompts file: lines ``{"text": "..."}`` of a .jsonl file, or one text that is a whole file.

    Raises:
        CalibrateError: the file cannot be read, is empty, or a line holds no text.
    """
    try:
        body = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrateError(f"--prompts {str(file)!r} cannot be read ({error}); give a text or .jsonl file") from error
    if file.suffix != ".jsonl":
        texts = [body]
    else:
        texts = []
        for number, line in enumerate(body.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise CalibrateError(f"--prompts {str(file)!r} line {number} is not JSON ({error})") from error
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise CalibrateError(f'--prompts {str(file)!r} line {number} is not {{"text": "..."}}; write it so')
            texts.append(record["text"])
    if not any(text.strip() for text in texts):
        raise CalibrateError(f"--prompts {str(file)!r} holds no text; give the kind of text that will be served")
    return texts


def sequences(tokenizer: Any, texts: list[str], length: int, limit: int) -> list[torch.Tensor]:
    """Token ids, int64 [up to length] each: long texts are cut, and the sum is at most `limit` tokens.

    Every piece starts as a prompt does, with the tokenizer's first special token where it has one: the first token is
    an attention sink, and factors must serve it too.
    """
    pieces: list[torch.Tensor] = []
    for text in texts:
        ids = tokenizer(text).input_ids
        start = ids[:1] if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id] else []
        body = ids[len(start) :]
        step = length - len(start)
        for at in range(0, len(body), step):
            piece = (start + body[at : at + step])[: max(0, limit)]
            if len(piece) < 2:
                continue
            pieces.append(torch.tensor(piece))
            limit -= len(piece)
    return pieces


def calibrate(
    model: Any, pieces: list[torch.Tensor], first: torch.Tensor, facts: ModelFacts, recent: int,
    progress: Progress | None = None,
) -> list[Factors]:  # fmt: skip
    """Factors of every layer of a transformers causal language model that was loaded with `attn_implementation` of
    `hook()`. Layers without attention get factors that change nothing.

    Args:
        pieces: token ids, int64 [tokens] each. first: token ids, int64 [n], that prompts begin with.
        recent: tokens of the window that will be served.

    Raises:
        CalibrateError: attention that our formats do not serve, or gradients that are not finite.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.eval()
    recorder = _Recorder(facts, recent)
    AttentionInterface.register(_HOOK, recorder.attend)
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
    at_zero = held_out.first_keys(model, _HOOK, first.to(model.get_input_embeddings().weight.device))
    for layer in recorder.keys:
        mean = at_zero[layer].float().mean(0)
        found[layer] = Factors(*fit(recorder.keys[layer]), *fit(recorder.values[layer]), mean).to("cpu")
    return found


def hook() -> str:
    """The name to load a model with: its attention can then be recorded."""
    AttentionInterface.register(_HOOK, held_out.exact)
    return _HOOK


def _backward(model: Any, piece: torch.Tensor, draw: torch.Generator) -> None:
    """Gradients of the log-likelihood of next tokens that the model itself draws."""
    table = model.get_input_embeddings()
    inputs = table(piece[None].to(table.weight.device)).detach().requires_grad_()
    states = model.get_decoder()(inputs_embeds=inputs, use_cache=False).last_hidden_state[0]
    top = states.detach().requires_grad_()
    for part in _chunks(top):
        logs = model.get_output_embeddings()(part).float().log_softmax(-1)
        with torch.no_grad():
            drawn = torch.multinomial(logs.exp().cpu(), 1, generator=draw).to(logs.device)
        logs.gather(1, drawn).sum().backward()
    states.backward(top.grad)


def _chunks(states: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, states.shape[0], _CHUNK):
        yield states[start : start + _CHUNK]


class _Recorder:
    """Keeps a pass's keys and values until their gradients are there."""

    def __init__(self, facts: ModelFacts, recent: int) -> None:
        self._facts, self._recent = facts, recent
        self.keys: dict[int, Moments] = {}
        self.values: dict[int, Moments] = {}
        self._pass: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention: key and value are [1, kv_heads, tokens, D]."""
        shape = (self._facts.kv_heads, self._facts.head_dim)
        for name, x in (("keys", key), ("values", value)):
            if (x.shape[1], x.shape[3]) != shape:
                raise CalibrateError(
                    f"layer {module.layer_idx} has {x.shape[1]} heads of {x.shape[3]} elements in its {name}, and "
                    f"config.json says {shape[0]} of {shape[1]}; serve this model without a file"
                )
        if options.get("s_aux") is not None:
            raise CalibrateError("attention with sinks of its own is not served by our formats; use dtype auto or fp8")
        how = held_out.Attention.of(module, options)
        if how.sliding_window is not None:  # stays in 16 bits, as engines serve it
            return held_out.exact(module, query, key, value, mask, **options)
        far_key, far_value = key.clone(), value.clone()
        far_key.retain_grad()
        far_value.retain_grad()
        self._pass.append((module.layer_idx, far_key, far_value))
        out = windowed(query, (far_key, far_value), (key, value), how.scale, self._recent, softcap=how.softcap)
        return out.transpose(1, 2).contiguous(), None

    def collect(self) -> None:
        """Add the pass to the moments, and forget it."""
        for layer, key, value in self._pass:
            for side, x in ((self.keys, key), (self.values, value)):
                moments = side.setdefault(layer, Moments(x.shape[1], x.shape[3], x.device))
                if x.grad is None:
                    raise CalibrateError(f"layer {layer} has no gradient; this model cannot be calibrated")
                # Position 0 has a mean of its own for its key.
                past = slice(1 if side is self.keys else 0, None)
                try:
                    moments.add(x.detach()[0].transpose(0, 1)[past], x.grad[0].transpose(0, 1)[past].double().square())
                except ValueError as error:
                    raise CalibrateError(f"layer {layer}: {error}") from error
        self._pass.clear()


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="kvpilot calibrate", description="Fit a model's static KV-cache factors.")
    parser.add_argument("model", type=Path, help="folder of a transformers model")
    parser.add_argument("--prompts", type=Path, required=True, help='text, or .jsonl of {"text": "..."}')
    parser.add_argument("--output", type=Path, help="default: kvpilot-calibration.safetensors beside the weights")
    parser.add_argument(
        "--length",
        type=int,
        default=4096,
        help="tokens of a sequence: as long as contexts that are served (default %(default)s)",
    )
    parser.add_argument("--tokens", type=int, default=16384, help="at most this many in all (default %(default)s)")
    parser.add_argument(
        "--dtype", choices=formats.own_names(), default=DTYPE, help="KV-cache dtype to serve (default %(default)s)"
    )
    parser.add_argument(
        "--recent",
        type=int,
        help=f"tokens of the recent window that is served (default: the dtype's, {formats.default_windows()})",
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where to run, such as cuda:0 (default here: %(default)s)",
    )
    options = parser.parse_args(argv)
    try:
        output = run(
            options.model,
            options.prompts,
            options.output,
            options.length,
            options.tokens,
            options.device,
            options.dtype,
            options.recent,
        )
    except CalibrateError as error:
        print(f"kvpilot calibrate: {error}", file=sys.stderr)
        return 2
    print(f"wrote {output}; serve with {calibration.VARIABLE}={output}")
    return 0


def run(
    model: Path, prompts: Path, output: Path | None, length: int, tokens: int, device: str, dtype: str = DTYPE,
    recent: int | None = None,
) -> Path:  # fmt: skip
    """Calibrate the model in a folder, write the file, and say what it gains; returns the file's path.

    Args:
        dtype: of the KV cache that will be served. recent: tokens of its recent window, None for its default.

    Raises:
        CalibrateError: whatever cannot work, named.
    """
    if length < 2 or tokens < length:
        raise CalibrateError(f"--length {length} and --tokens {tokens} leave no sequence; use at least 2 and --length")
    if recent is None:
        recent = formats.parse(dtype).recent_tokens(context=length - 1)
    if not 0 <= recent < length:
        raise CalibrateError(f"--recent {recent} leaves no token outside the window; use 0 to --length {length}")
    try:
        facts = calibration.ModelFacts.read(model)
    except (OSError, ValueError) as error:
        raise CalibrateError(
            f"model {str(model)!r} has no usable config.json ({error}); give a model's folder"
        ) from error
    if facts.head_dim not in formats.HEAD_DIMS:
        raise CalibrateError(f"head_dim {facts.head_dim} has no kvpilot format; formats take {formats.HEAD_DIMS}")
    output = output or model / "kvpilot-calibration.safetensors"
    if not output.parent.is_dir():
        raise CalibrateError(f"--output {str(output)!r}: there is no folder {str(output.parent)!r}; make it first")
    texts = read_prompts(prompts)
    tokenizer = AutoTokenizer.from_pretrained(model)
    exact = torch.float32 if device == "cpu" else torch.bfloat16
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=exact, attn_implementation=hook()).to(device)
    pieces, kept_back = split(tokenizer, texts, length, tokens)
    if not pieces:
        raise CalibrateError(f"--prompts {str(prompts)!r} gives no sequence of two tokens; give more text")

    def report(done: int, total: int) -> None:
        print(f"\r{done:,} of {total:,} tokens", end="" if done < total else "\n", file=sys.stderr, flush=True)

    text = torch.cat(pieces).tolist()
    first = torch.tensor(beginnings(tokenizer, text, max(1, lone(len(text)))))
    layers = calibrate(loaded, pieces, first, facts, recent, report)
    calibration.save(output, layers, facts)
    read = sum(piece.numel() for piece in pieces)
    print(gain(loaded, tokenizer, kept_back, layers, dtype, recent, facts, read), file=sys.stderr)
    return output


def split(tokenizer: Any, texts: list[str], length: int, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The sequences to fit to, and others to judge by: what follows `tokens`, or the last one where nothing does."""
    pieces = sequences(tokenizer, texts, length, tokens)
    kept_back = sequences(tokenizer, texts, length, tokens + length)[len(pieces) :]
    if not kept_back and len(pieces) > 1:
        kept_back = [pieces.pop()]
    return pieces, kept_back


def gain(
    model: Any,
    tokenizer: Any,
    kept_back: list[torch.Tensor],
    layers: list[Factors],
    dtype: str,
    recent: int,
    facts: ModelFacts,
    read: int,
) -> str:
    """A line on what the factors do on text that they were not fitted to, beside those that an engine finds itself.

    Args:
        read: tokens of the built-in text that such an engine reads, at most.
    """
    if not kept_back:
        return "no text was left to judge the factors by; give more than one sequence"
    device = model.get_input_embeddings().weight.device
    context = getattr(model.config.get_text_config(), "max_position_embeddings", 0) or LONGEST
    ids = torch.tensor(text_ids(tokenizer, min(LONGEST, context, read)), device=device)
    own = held_out.self_calibrated(model, _HOOK, ids, context)
    file = {layer: layers[layer].to(device) for layer in own}
    none = {layer: Factors.identity(facts.kv_heads, facts.head_dim, device) for layer in own}
    pieces = [piece.to(device) for piece in kept_back]
    found = [held_out.damage(model, _HOOK, pieces, dtype, factors, recent) for factors in (file, own, none)]
    return (
        f"{dtype} with a recent window of {recent}, on {sum(map(len, pieces)):,} other tokens: {found[0]:.1f} "
        f"millinats with this file, {found[1]:.1f} as an engine calibrates itself, {found[2]:.1f} without calibration"
    )


if __name__ == "__main__":
    sys.exit(main())
