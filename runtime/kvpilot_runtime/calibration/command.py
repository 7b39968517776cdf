"""`kvpilot calibrate MODEL --prompts FILE`: fit static factors to a model and write them to a calibration file.

Calibration sequences must be as long as the contexts that will be served. RoPE rotates the mean of keys with the
position, so a mean that is fitted to short texts is wrong at positions far beyond their length.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpilot_formats import formats
from kvpilot_runtime.calibration import factors_file, fitting
from kvpilot_runtime.calibration.fitting import CalibrateError
from kvpilot_runtime.calibration.text import beginnings, lone


def read_prompts(file: Path) -> list[str]:
    """Return the texts of a prompts file: the "text" of each line of a .jsonl file, or any other file as one text."""
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
    """Cut texts into sequences of token ids, int64 [at most `length`] each, with at most `limit` tokens in all.

    If the tokenizer has a BOS token, every sequence starts with it, as prompts do, because the first token gets much
    attention.
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


def main(argv: list[str] | None = None) -> int:
    """Run `kvpilot calibrate`, and return its exit status."""
    parser = argparse.ArgumentParser(prog="kvpilot calibrate", description="Fit a model's static KV-cache factors.")
    parser.add_argument("model", type=Path, help="folder of a transformers model")
    parser.add_argument(
        "--prompts", type=Path, required=True, help='text file, or .jsonl file with lines {"text": "..."}'
    )
    parser.add_argument("--output", type=Path, help="default: kvpilot-calibration.safetensors in the model's folder")
    parser.add_argument(
        "--length",
        type=int,
        default=4096,
        help="tokens of a sequence; take the length of the contexts to serve (default %(default)s)",
    )
    parser.add_argument("--tokens", type=int, default=16384, help="most tokens in all sequences (default %(default)s)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="device to run on, such as cuda:0 (default on this machine: %(default)s)",
    )
    options = parser.parse_args(argv)
    try:
        output = run(options)
    except CalibrateError as error:
        print(f"kvpilot calibrate: {error}", file=sys.stderr)
        return 2
    print(f"wrote {output}; serve with {factors_file.VARIABLE}={output}")
    return 0


def run(options: argparse.Namespace) -> Path:
    """Calibrate the model in a folder, write the file, and return the file's path.

    Raises:
        CalibrateError: the model, the prompts or an option cannot be used.
    """
    model, prompts, length, tokens = options.model, options.prompts, options.length, options.tokens
    device = options.device
    if length < 2 or tokens < length:
        raise CalibrateError(f"--length {length}, --tokens {tokens}: use at least 2, and at least --length tokens")
    try:
        facts = factors_file.ModelFacts.read(model)
    except (OSError, ValueError) as error:
        raise CalibrateError(
            f"model {str(model)!r} has no usable config.json ({error}); give a model's folder"
        ) from error
    if formats.stored_dim(facts.head_dim) is None:
        raise CalibrateError(f"head_dim {facts.head_dim} has no kvpilot format; formats take {formats.SERVED}")
    output: Path = options.output or model / "kvpilot-calibration.safetensors"
    if not output.parent.is_dir():
        raise CalibrateError(f"--output {str(output)!r}: there is no folder {str(output.parent)!r}; make it first")
    texts = read_prompts(prompts)
    tokenizer = AutoTokenizer.from_pretrained(model)
    exact = torch.float32 if device == "cpu" else torch.bfloat16
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=exact).to(device)
    pieces = sequences(tokenizer, texts, length, tokens)
    if not pieces:
        raise CalibrateError(f"--prompts {str(prompts)!r} gives no sequence of two tokens; give more text")

    def report(done: int, total: int) -> None:
        print(f"\r{done:,} of {total:,} tokens", end="" if done < total else "\n", file=sys.stderr, flush=True)

    text = torch.cat(pieces).tolist()
    first = torch.tensor(beginnings(tokenizer, text, max(1, lone(len(text)))))
    layers = fitting.fit_model(loaded, pieces, first, facts, report)
    factors_file.save(output, layers, facts)
    return output


if __name__ == "__main__":
    sys.exit(main())
