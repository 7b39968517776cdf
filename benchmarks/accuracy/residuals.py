"""Measure the damage of a `k4v4` cache that keeps the residuals of some blocks.

    python -m benchmarks.accuracy.residuals --texts FOLDER --out FILE

A block of 64 tokens has a base page, and may have a residual page that refines it to 8 bits. A query always reads the
newest blocks, including its own block, at 8 bits (`--floors` sets their number). Only a share of the older blocks
keeps its residuals. The *order* decides which residuals are freed first:

- `oldest`: residuals of the oldest blocks.
- `values`: residuals of all values, the oldest first; then residuals of keys, the oldest first.

The model computes in float32, on the texts of accuracy.py, with factors that an engine computes at start. The row
`today` is a window of exactly the last 64 tokens. Rows `hit` cover the 64 tokens after a hit in the prefix cache. Rows
that are already in FILE are not computed again. FOLDER holds the tokens of the texts, for machines without the
documents. `--cut` only writes these tokens.
"""

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.accuracy.accuracy import CHUNK, PLAN, Base, Tally, merge
from benchmarks.accuracy.accuracy_model import _PIECE, Probe, _causal
from benchmarks.accuracy.accuracy_rows import Reading
from benchmarks.accuracy.accuracy_texts import Sequence, sequences
from benchmarks.accuracy.codec import Codec, own
from benchmarks.accuracy.rivals import plain
from benchmarks.accuracy.windowed import Sides, windowed
from kvpilot_formats import formats
from kvpilot_runtime.calibration.text import text_ids
from kvpilot_smallmodels.models import MODELS

FORMAT = formats.parse("k4v4")
BLOCK, WINDOW, AFTER_HIT = 64, 64, 64
HITS = (256, 512, 768)
ORDERS = ("oldest", "values")
_AT_ONCE = 9216
"""Largest number of tokens that run at the same time."""

TODAY = "today"
Kept = torch.Tensor | str | None
"""Blocks to read at 8 bits, bool [sides, query blocks, key blocks].

TODAY means the last WINDOW tokens instead, and None 16 bits.
"""
Rule = tuple[str, float, int]
"""Rule by which blocks keep residuals: order of freeing, share of older blocks that keep theirs, floor in blocks.

The floor is the number of newest blocks that always keep their residuals.
"""


class Elastic(Probe):
    """Model that reads each block of its cache with or without its residual, for several sequences at a time."""

    exact = (plain.bf16(), plain.bf16())

    def calibrate(self, tokens: int) -> None:
        """Compute the calibration factors of each full-attention layer, as an engine does at start."""
        ids = torch.tensor(text_ids(self.tokenizer, tokens))
        factors = self.self_calibrated(ids, self.model.config.max_position_embeddings)
        self.codecs = {layer: [own(FORMAT, one, recent) for recent in (False, True)] for layer, one in factors.items()}
        # Only sliding-window layers use this argument, and they read their cache in 16 bits anyway.
        self.reading = Reading(lambda _layer: own(FORMAT))

    @torch.inference_mode()
    def states(self, tokens: torch.Tensor, kept: Kept, hit: int = 0) -> torch.Tensor:
        """Return the last hidden states [sequences, tokens, hidden] of `tokens`, [sequences, tokens].

        The first `hit` tokens come from the prefix cache: their queries attend in 16 bits.
        """
        self.kept, self.hit = kept, hit
        found: torch.Tensor = self.model.model(tokens, use_cache=False).last_hidden_state
        return found

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        if self._seen is not None or options.get("sliding_window") is not None:
            return super()._attend(module, query, key, value, _mask, **options)
        scale, fresh = options["scaling"], (key, value)
        codecs = self.exact if self.kept is None else self.codecs[module.layer_idx]
        base, fine = (_read_back(codec, fresh) for codec in codecs)
        if self.kept is None:
            out = _causal(query, base[0], base[1], scale)
        elif isinstance(self.kept, str):
            out = windowed(query, base, fine, scale, WINDOW, since=self.hit)
        else:
            out = mixed(query, base, fine, self.kept, scale)
        if self.hit:
            q, k, v = (x[:, :, : self.hit] for x in (query, *fresh))
            out[:, :, : self.hit] = _causal(q, k, v, scale)
        return out.transpose(1, 2).contiguous(), None


def _read_back(codec: Codec, fresh: Sides) -> Sides:
    key, value = (x.transpose(1, 2).contiguous() for x in fresh)
    return codec.key(key).transpose(1, 2), codec.value(value).transpose(1, 2)


def mixed(query: torch.Tensor, base: Sides, fine: Sides, kept: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute causal attention that reads some blocks with their residuals and the others without them.

    Args:
        query: [sequences, heads, tokens, D].
        base: keys and values without residuals.
        fine: keys and values with residuals.
        kept: blocks that a query reads from `fine` (see `Kept`). It reads the others from `base`.
        scale: factor on scores.
    """
    group, outs = query.shape[1] // base[0].shape[1], []
    (key, value), (fine_key, fine_value) = (tuple(x.repeat_interleave(group, 1) for x in side) for side in (base, fine))
    for start in range(0, query.shape[2], _PIECE):
        seen = min(start + _PIECE, query.shape[2])
        at, block = torch.arange(start, seen), torch.arange(seen) // BLOCK
        keys, values = kept[:, at // BLOCK][..., block]
        q = query[:, :, start:seen] * scale
        scores = torch.where(keys, q @ fine_key[:, :, :seen].mT, q @ key[:, :, :seen].mT)
        p = scores.masked_fill_(torch.arange(seen) > at[:, None], -torch.inf).softmax(-1)
        outs.append(p.masked_fill(values, 0) @ value[:, :, :seen] + p * values @ fine_value[:, :, :seen])
    return torch.cat(outs, 2)


def keep(order: str, share: float, floor: int, count: int) -> tuple[torch.Tensor, float]:
    """Return the `Kept` of `count` blocks, and the share of residuals that blocks older than the floor keep.

    `order`, `share` and `floor` are those of a `Rule`. The returned share differs from `share` by rounding to whole
    blocks.
    """
    query, block = torch.arange(count)[:, None], torch.arange(count)
    older = (query + 1 - floor).clamp_min(0)
    if order == "values":
        pages = (2 * share * older).round()
        sides = (pages.minimum(older), pages - pages.minimum(older))
    else:
        sides = ((share * older).round(),) * 2
    kept = torch.stack([(block >= older - newest) & (block <= query) for newest in sides])
    return kept, float(sum(side.sum() for side in sides) / (2 * older.sum()).clamp_min(1))


@dataclass
class Batch:
    """Sequences of one length, with the results of a 16-bit cache. Only the tokens after `hit` are compared."""

    names: list[str]
    tokens: torch.Tensor
    bases: list[Base]
    hit: int


def prepare(probe: Elastic, texts: list[Sequence], hit: int = 0) -> list[Batch]:
    """Run the model with a 16-bit cache over the texts. Return batches of sequences of one length with the results.

    With `hit`, cut each sequence after `hit` + AFTER_HIT tokens, and leave out shorter ones.
    """
    end = hit + AFTER_HIT if hit else None
    texts = [(name, tokens[:end]) for name, tokens in texts if len(tokens) >= (end or 0)]
    batches = []
    for length in sorted({len(tokens) for _, tokens in texts}):
        alike = [one for one in texts if len(one[1]) == length]
        size = max(1, _AT_ONCE // length)
        for part in (alike[at : at + size] for at in range(0, len(alike), size)):
            names, tokens = [name for name, _ in part], torch.stack([tokens for _, tokens in part])
            states = probe.states(tokens, None)
            bases = [Base(probe, t[hit:], s[hit:]) for t, s in zip(tokens, states, strict=True)]
            batches.append(Batch(names, tokens, bases, hit))
    return batches


def measure(out: Path, model: str, name: str, probe: Elastic, batches: list[Batch], rule: Rule | None = None) -> None:
    """Measure a row and write it to a file, unless the file has it already.

    Args:
        out: the JSON file.
        model: name of the model, under which the file has the row.
        name: the row's name.
        probe: the model.
        batches: the sequences, with the results of a 16-bit cache.
        rule: rule by which residuals are kept; None measures TODAY.
    """
    if not batches or (out.exists() and name in json.loads(out.read_text()).get(model, {})):
        return
    tally, shares, began = Tally(), [], time.monotonic()
    for batch in batches:
        kept, share = keep(*rule, -(-batch.tokens.shape[1] // BLOCK)) if rule else (TODAY, 0.0)
        shares += [share] * batch.tokens.numel()
        states = probe.states(batch.tokens, kept, batch.hit)[:, batch.hit :]
        for text, base, mine in zip(batch.names, batch.bases, states, strict=True):
            tally.add(text, base, mine, probe)
    row = tally.summary() | {"share": round(sum(shares) / len(shares), 3)}
    merge(out, model, {name: row})
    print(f"{model} {name}: {row['mean_kl']} in {time.monotonic() - began:.1f} s", flush=True)


def main() -> None:
    """Measure the rows that the command line requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--models", nargs="+", default=["smollm2-135m", "gemma3-270m"], choices=sorted(MODELS))
    add("--orders", nargs="+", default=list(ORDERS), choices=ORDERS)
    add("--shares", nargs="+", type=float, default=[0, 0.125, 0.25, 0.5, 0.75, 1])
    add("--floors", nargs="+", type=int, default=[1, 2], help="number of newest blocks that keep their residuals")
    add("--texts", type=Path, required=True, help="folder of the tokens of the texts; created if it is missing")
    add("--cut", action="store_true", help="create the folder of --texts, and do nothing else")
    add("--tokens", type=int, help="largest number of tokens of a sequence, to try the program")
    add("--sequences", type=int, help="number of sequences, to try the program")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    for model in asked.models:
        folder = MODELS[model](None)
        file = asked.texts / f"{model}.pt"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(sequences(AutoTokenizer.from_pretrained(folder), PLAN), file)
        if asked.cut:
            continue
        torch.set_default_device(asked.device)
        loaded = torch.load(file)[: asked.sequences]
        texts = [(name, tokens[: asked.tokens].to(asked.device)) for name, tokens in loaded]
        probe = Elastic(folder)
        probe.calibrate(CHUNK)
        row = partial(measure, asked.out, model)
        batches = [batch for hit in HITS for batch in prepare(probe, texts, hit)]
        row(f"hit {TODAY}", probe, batches)
        for share in asked.shares:
            row(f"hit oldest {share:g} floor 1", probe, batches, ("oldest", share, 1))
        batches = prepare(probe, texts)
        row(TODAY, probe, batches)
        for floor, order, share in product(asked.floors, asked.orders, asked.shares):
            order = "oldest" if share in (0, 1) else order  # all orders are equal at 0 and 1
            row(f"{order} {share:g} floor {floor}", probe, batches, (order, share, floor))


if __name__ == "__main__":
    main()
