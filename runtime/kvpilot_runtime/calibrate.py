"""`kvpilot calibrate MODEL --prompts FILE`: fit static factors to a model and write them to a calibration file.

The model reads the texts once, forwards and backwards. At each layer its keys (after RoPE), its values, and the
gradients of the log-likelihood with respect to both, at next tokens drawn from the model itself, are added to the
moments that `kvpilot_kernels.fit` turns into factors. Sequences must be as long as the contexts that will be served:
RoPE turns a channel's mean with the position, so a mean found on short texts is wrong, and harmful, far beyond them.
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
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvpilot_kernels import formats
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.fit import Moments, fit
from kvpilot_runtime import calibration

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


def calibrate(model: Any, pieces: list[torch.Tensor], progress: Progress | None = None) -> list[Factors]:
    """Factors of every layer of a transformers causal language model that was loaded with `attn_implementation` of
    `hook()`.

    Args:
        pieces: token ids, int64 [tokens] each.

    Raises:
        CalibrateError: attention that our formats do not serve, or gradients that are not finite.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.eval()
    recorder = _Recorder()
    AttentionInterface.register(_HOOK, recorder.attend)
    draw = torch.Generator().manual_seed(0)
    done, total = 0, sum(piece.numel() for piece in pieces)
    for piece in pieces:
        _backward(model, piece, draw)
        recorder.collect()
        done += piece.numel()
        if progress:
            progress(done, total)
    if sorted(recorder.keys) != list(range(len(recorder.keys))) or not recorder.keys:
        ran = sorted(recorder.keys)
        raise CalibrateError(
            f"attention ran in layers {ran}; only models in which every layer attends can be calibrated"
        )
    found = []
    for layer in sorted(recorder.keys):
        key, value = fit(recorder.keys[layer]), fit(recorder.values[layer])
        found.append(Factors(key[0].cpu(), key[1].cpu(), value[0].cpu(), value[1].cpu()))
    return found


def hook() -> str:
    """The name to load a model with: its attention can then be recorded."""
    AttentionInterface.register(_HOOK, sdpa_attention_forward)
    AttentionMaskInterface.register(_HOOK, sdpa_mask)
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

    def __init__(self) -> None:
        self.keys: dict[int, Moments] = {}
        self.values: dict[int, Moments] = {}
        self._pass: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        """transformers' attention: key and value are [1, kv_heads, tokens, D]."""
        if options.get("softcap"):
            raise CalibrateError("soft-capped attention cannot be calibrated yet; serve this model without a file")
        if key.shape != value.shape:
            raise CalibrateError(f"keys {tuple(key.shape)} and values {tuple(value.shape)} differ in shape, which our "
                                 "formats do not serve")  # fmt: skip
        key.retain_grad()
        value.retain_grad()
        self._pass.append((module.layer_idx, key, value))
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    def collect(self) -> None:
        """Add the pass to the moments, and forget it."""
        for layer, key, value in self._pass:
            for side, x in ((self.keys, key), (self.values, value)):
                moments = side.setdefault(layer, Moments(x.shape[1], x.shape[3], x.device))
                if x.grad is None:
                    raise CalibrateError(f"layer {layer} has no gradient; this model cannot be calibrated")
                try:
                    moments.add(x.detach()[0].transpose(0, 1), x.grad[0].transpose(0, 1))
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
    parser.add_argument("--device", default="cpu", help="where to run, such as cuda:0 (default %(default)s)")
    options = parser.parse_args(argv)
    try:
        output = run(options.model, options.prompts, options.output, options.length, options.tokens, options.device)
    except CalibrateError as error:
        print(f"kvpilot calibrate: {error}", file=sys.stderr)
        return 2
    print(f"wrote {output}; serve with {calibration.VARIABLE}={output}")
    return 0


def run(model: Path, prompts: Path, output: Path | None, length: int, tokens: int, device: str) -> Path:
    """Calibrate the model in a folder and write the file; returns its path.

    Raises:
        CalibrateError: whatever cannot work, named.
    """
    if length < 2 or tokens < length:
        raise CalibrateError(f"--length {length} and --tokens {tokens} leave no sequence; use at least 2 and --length")
    try:
        facts = calibration.ModelFacts.read(model)
    except (OSError, ValueError, KeyError) as error:
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
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation=hook()).to(device)
    pieces = sequences(tokenizer, texts, length, tokens)
    if not pieces:
        raise CalibrateError(f"--prompts {str(prompts)!r} gives no sequence of two tokens; give more text")

    def report(done: int, total: int) -> None:
        print(f"\r{done:,} of {total:,} tokens", end="" if done < total else "\n", file=sys.stderr, flush=True)

    calibration.save(output, calibrate(loaded, pieces, report), facts)
    return output


if __name__ == "__main__":
    sys.exit(main())
