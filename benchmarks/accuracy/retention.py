"""Cost of a bounded cache: `python -m benchmarks.accuracy.retention --tokens 2048 --budgets 256,512`.

SmolLM2-135M reads one stream of text in float32. Attention sees the tokens that an engine keeps (docs/retention.md). A
budget covers sinks and window.

Rows for comparison are the whole cache, the whole cache in `--dtype`, and the window of the largest budget without
sinks, which engines do not offer. Perplexity covers the tokens after the largest budget, because only there all rows
differ.

- `--needle LENGTH` asks for facts at five depths of a text of LENGTH tokens instead.
- `--equal` compares `--dtype`, as engines serve it (factors found at start, default recent window), with a 16-bit
  budget of the same bytes for a sequence of 4,096 tokens.
- `--beyond LENGTH` shows the cost of positions beyond the trained length (8,192 for SmolLM2).

A row of 2,048 tokens takes about half a minute on two cores; 64K tokens need a GPU.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.accuracy.accuracy import CHUNK
from benchmarks.accuracy.accuracy_model import Probe
from benchmarks.accuracy.accuracy_needle import DEPTHS, needles
from benchmarks.accuracy.accuracy_needle import TEXT as NEEDLE_TEXT
from benchmarks.accuracy.accuracy_rows import CONTEXT, SELF, Reading, bits
from benchmarks.accuracy.accuracy_rows import reading as row
from benchmarks.accuracy.accuracy_texts import EVALUATION, sequences
from benchmarks.accuracy.codec import own
from kvpilot_formats import formats
from kvpilot_runtime.calibration.text import text_ids
from kvpilot_smallmodels.models import smollm2_135m

Kept = tuple[int, int, int] | None

_PIECE = 256
"""Number of queries whose scores are in memory at the same time."""


class Bounded(Probe):
    """Model with a bounded cache.

    `kept` is the bound: (sinks, window, page) in tokens, or None for the whole cache.
    """

    kept: Kept = None

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        if self.kept is None:
            return super()._attend(module, query, key, value, _mask, **options)
        sinks, window, page = self.kept
        first = -(-sinks // page) * page
        outs = []
        for begin in range(0, query.shape[2], _PIECE):
            at = torch.arange(begin, min(begin + _PIECE, query.shape[2]))
            low = max(first, (begin - window + 1) // page * page)
            keys = torch.cat(
                [torch.arange(min(first, low, len(at) + begin)), torch.arange(low, max(low, begin + len(at)))]
            )
            seen = (keys < first) | (keys >= (at[:, None] - window + 1).div(page, rounding_mode="floor") * page)
            seen &= keys <= at[:, None]
            k, v = key[:, :, keys], value[:, :, keys]
            outs.append(
                functional.scaled_dot_product_attention(
                    query[:, :, at], k, v, attn_mask=seen, scale=options["scaling"], enable_gqa=True
                )
            )
        return torch.cat(outs, 2).transpose(1, 2).contiguous(), None


def nll(probe: Probe, tokens: torch.Tensor, reading: Reading | None) -> torch.Tensor:
    """Return the negative log-likelihood of each token except the first, float64 [tokens - 1]."""
    states, found = probe.hidden(tokens, reading), []
    for start, logits in probe.logits(states):
        following = tokens[start + 1 : start + 1 + logits.shape[0]]
        found.append(-logits[: len(following)].log_softmax(-1).gather(1, following[:, None])[:, 0].double())
    return torch.cat(found)


def perplexities(
    probe: Probe, tokens: torch.Tensor, reading: Reading | None, after: int, parts: int | None
) -> list[float]:
    """Return the perplexity of each part of a stream, which has `parts` tokens (None: the whole stream is one part).

    Leave out the tokens before position `after`.
    """
    losses = nll(probe, tokens, reading)
    cuts = range(0, len(tokens), parts or len(tokens))
    return [float(losses[max(begin, after) - 1 : begin + cuts.step - 1].mean().exp()) for begin in cuts]


def main() -> None:
    """Print the table that the command line requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=int, default=2048)
    add("--budgets", type=lambda text: [int(n) for n in text.split(",")], default=[256, 512])
    add("--sinks", type=int, default=4)
    add("--page", type=int, default=16)
    add("--only", default="", metavar="WORD", help="rows that have it in their names")
    add("--dtype", default="k4v2", choices=formats.own_names())
    add("--texts", type=lambda text: text.split(","), default=list(EVALUATION))
    add("--beyond", type=int, metavar="LENGTH", help="that the model was trained for: the stream in parts of so many "
        "tokens, beside each part as a stream of its own, whose positions begin at 0")  # fmt: skip
    add("--parts", type=int, metavar="TOKENS", help="perplexity of each part of so many tokens of the stream")
    add("--equal", action="store_true", help=f"beside the budget of equal bytes at {CONTEXT} tokens")
    add("--needle", type=int, choices=(1024, 4096, 8192), help="tokens of a prompt")
    add("--model", type=Path, help="a folder; without it SmolLM2-135M")
    asked = parser.parse_args()
    probe = Bounded(asked.model or smollm2_135m())
    fmt, coarse = formats.parse(asked.dtype), f"whole in {asked.dtype}, uncalibrated, no recent window"
    codec = own(fmt)
    quantized = Reading(lambda _layer: codec)
    if asked.equal:
        served = f"{asked.dtype}+{SELF}+w{fmt.window}"
        ids = torch.tensor(text_ids(probe.tokenizer, CHUNK))
        quantized = row(served, {SELF: probe.self_calibrated(ids, probe.model.config.max_position_embeddings)})
        held = int(CONTEXT * bits(served, probe.model.config.head_dim) / 16)
        coarse = f"whole in {served}, {held} tokens' bytes of 16 bits"
        asked.tokens = CONTEXT
        # Choose a budget so that the sinks' pages and a window that begins inside a page need at most `held` tokens.
        asked.budgets = [held - (-(-asked.sinks // asked.page) + 1) * asked.page + 1 + asked.sinks]
    most = max(asked.budgets)
    rows: list[tuple[str, Kept, Reading | None]] = [
        ("whole", None, None),
        (coarse, None, quantized),
        *[(f"{asked.sinks} sinks, window {n - asked.sinks}", (asked.sinks, n - asked.sinks, asked.page), None)
          for n in asked.budgets],
        (f"no sinks, window {most}", (0, most, asked.page), None),
    ]  # fmt: skip
    rows = [row for row in rows if asked.only in row[0]]
    if asked.needle:
        ((_, haystack),) = sequences(probe.tokenizer, NEEDLE_TEXT)
        print("| cache |", " | ".join(f"{int(100 * depth)}%" for depth in DEPTHS), "|")
        for name, kept, reading in rows:
            probe.kept = kept
            found = needles(probe, reading, haystack, (asked.needle,))
            counts = (f"{n} of {found['asked_each']}" for n in found["found"].values())
            print(f"| {name} |", " | ".join(counts), "|", flush=True)
        return
    texts = sequences(probe.tokenizer, [(name, asked.tokens, 1) for name in asked.texts])
    if asked.beyond:
        probe.kept = (asked.sinks, most - asked.sinks, asked.page)
        print("| text | from token | in the stream | on its own |")
        for name, tokens in texts:
            losses = nll(probe, tokens, None)
            for begin in range(0, asked.tokens, asked.beyond):
                alone = nll(probe, tokens[begin : begin + asked.beyond], None)
                part = losses[begin + most : begin + asked.beyond - 1]
                shown = (f"{float(one.mean().exp()):.2f}" for one in (part, alone[most:]))
                print(f"| {name} | {begin} |", " | ".join(shown), "|", flush=True)
        return
    print("| cache |", " | ".join(name for name, _ in texts), "|")
    for name, kept, reading in rows:
        probe.kept = kept
        every = [perplexities(probe, tokens, reading, most, asked.parts) for _, tokens in texts]
        print(f"| {name} |", " | ".join(f"{one:.2f}" for parts in every for one in parts), "|", flush=True)


if __name__ == "__main__":
    main()
