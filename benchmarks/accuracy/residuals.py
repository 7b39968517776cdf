"""Damage of a `k4v4` cache that keeps the residuals of some blocks.

    python -m benchmarks.accuracy.residuals --texts FOLDER --out FILE

A block of 64 tokens has a base page, and may have a residual page that refines it to 8 bits. A query reads the newest
blocks (`--floors`, its own block included) at 8 bits always. Of all older blocks, a share keeps its residuals. Each
order says which residuals are freed first:

- `oldest`, `newest`: by position.
- `lightest`, `decayed`: least attention mass so far, over all layers. `decayed` halves it with every block of queries.
- `hindsight`: least mass from the queries of this very block, which no engine knows in time.
- `layered`: pairs of layer and block, least mass so far first.
- `early`, `late`: residuals of early or late layers first, in each layer the oldest first.
- `values`, `keys`: residuals of all values (or keys) first, the oldest first.
- `light-values`: residuals of all values first, the lightest first.

The model computes in float32, on the texts of accuracy.py, with factors that an engine finds at start. `today` is the
recent window as a ring keeps it. Rows `hit` cover the 64 tokens after a hit in the prefix cache. Rows that FILE has are
not computed again. FOLDER keeps the texts' tokens, for a machine without the documents; `--cut` makes only these.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoTokenizer

from benchmarks.accuracy.accuracy import CHUNK, PLAN, Base, Tally, merge
from benchmarks.accuracy.accuracy_model import Probe, _causal
from benchmarks.accuracy.accuracy_rows import Reading
from benchmarks.accuracy.accuracy_texts import Sequence, sequences
from benchmarks.accuracy.codec import Codec, own
from benchmarks.accuracy.rivals import plain
from kvpilot_formats import formats
from kvpilot_kernels.reference.windowed import Sides, windowed
from kvpilot_runtime.calibration.text import text_ids
from kvpilot_smallmodels.models import MODELS

FORMAT = formats.parse("k4v4")
BLOCK, WINDOW, AFTER_HIT = 64, 64, 64
HITS = (256, 512, 768)
ORDERS = (
    "oldest", "newest", "lightest", "decayed", "hindsight", "layered", "early", "late", "values", "keys",
    "light-values",
)  # fmt: skip
_PIECE = 512
_AT_ONCE = 9216
"""Largest number of tokens that run at the same time."""

TODAY = "today"
Kept = torch.Tensor | str | None
"""Blocks read at 8 bits, bool [layers, sides, sequences, query blocks, key blocks]; or TODAY; or None for 16 bits."""

Chosen = Callable[[torch.Tensor], tuple[Kept, float]]
"""Function from a batch's masses to the kept residuals and their share."""


class Elastic(Probe):
    """Model that reads each block of its cache with or without its residual, for several sequences at a time."""

    exact = (plain.bf16(), plain.bf16())

    def calibrate(self, tokens: int) -> None:
        """Compute the factors of each full layer, as an engine does at start."""
        ids = torch.tensor(text_ids(self.tokenizer, tokens))
        factors = self.self_calibrated(ids, self.model.config.max_position_embeddings)
        self.full = {layer: at for at, layer in enumerate(factors)}
        self.codecs = {at: [own(FORMAT, factors[i], recent) for recent in (False, True)] for i, at in self.full.items()}
        self.reading = Reading(lambda _layer: own(FORMAT))  # only layers with a sliding window look at it: 16 bits

    @torch.inference_mode()
    def states(self, tokens: torch.Tensor, kept: Kept, hit: int = 0) -> torch.Tensor:
        """Return the last hidden states [sequences, tokens, hidden] of `tokens`, [sequences, tokens]."""
        self.kept, self.hit = kept, hit
        self.mass: list[torch.Tensor] = []  # by full layer, [sequences, query blocks, key blocks]
        found: torch.Tensor = self.model.model(tokens, use_cache=False).last_hidden_state
        return found

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        if self._seen is not None or options.get("sliding_window") is not None:
            return super()._attend(module, query, key, value, _mask, **options)
        scale, at, fresh = options["scaling"], self.full[module.layer_idx], (key, value)
        base, fine = (_read_back(codec, fresh) for codec in (self.codecs[at] if self.kept is not None else self.exact))
        if isinstance(self.kept, str):
            out = windowed(query, base, fine, scale, WINDOW, since=self.hit)
        else:
            count = -(-query.shape[2] // BLOCK)
            kept = torch.zeros(2, 1, count, count, dtype=torch.bool) if self.kept is None else self.kept[at]
            out, mass = mixed(query, base, fine, kept, scale)
            self.mass.append(mass)
        if self.hit:
            out[:, :, : self.hit] = _causal(*(x[:, :, : self.hit] for x in (query, *fresh)), scale)
        return out.transpose(1, 2).contiguous(), None


def _read_back(codec: Codec, fresh: Sides) -> Sides:
    key, value = (
        side(x.transpose(1, 2).contiguous()).transpose(1, 2)
        for side, x in zip((codec.key, codec.value), fresh, strict=True)
    )
    return key, value


def mixed(query: torch.Tensor, base: Sides, fine: Sides, kept: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """Compute causal attention that reads from `fine` the blocks that `kept` has for a query's block.

    `kept` is bool [sides, sequences or 1, query blocks, key blocks]. Also return the attention of each block of queries
    to each block of keys, [sequences, blocks, blocks].
    """
    group, count, outs, mass = query.shape[1] // base[0].shape[1], kept.shape[-1], [], torch.zeros(())
    (key, value), (fine_key, fine_value) = (tuple(x.repeat_interleave(group, 1) for x in side) for side in (base, fine))
    for start in range(0, query.shape[2], _PIECE):
        seen = min(start + _PIECE, query.shape[2])
        at, block = torch.arange(start, seen), torch.arange(seen) // BLOCK
        keys, values = kept[:, :, at // BLOCK][..., block].unsqueeze(2)
        q = query[:, :, start:seen] * scale
        scores = torch.where(keys, q @ fine_key[:, :, :seen].mT, q @ key[:, :, :seen].mT)
        p = scores.masked_fill_(torch.arange(seen) > at[:, None], -torch.inf).softmax(-1)
        outs.append(p.masked_fill(values, 0) @ value[:, :, :seen] + p * values @ fine_value[:, :, :seen])
        # Products add in a fixed order; index_add_ does not on a GPU.
        rows, columns = (functional.one_hot(b, count).double() for b in (at // BLOCK, block))
        mass = mass + rows.T @ p.sum(1).double() @ columns
    return torch.cat(outs, 2), mass


def scores(order: str, mass: torch.Tensor) -> torch.Tensor:
    """Return scores [layers or 1, sides or 1, sequences or 1, query blocks, key blocks]. The lowest are freed first.

    `mass` is [layers, sequences, query blocks, key blocks]. Pairs of layer, side and block compete if the first two
    dimensions are not 1.
    """
    layers, _, count, _ = mass.shape
    age = torch.arange(count, dtype=torch.float64).expand(1, 1, 1, count, count)
    depth = torch.arange(layers)[:, None, None, None, None] * count
    side = torch.arange(2)[:, None, None, None]
    known = (mass.cumsum(2) - mass)[:, None]
    whole = known.sum(0, keepdim=True)
    if order == "decayed":
        found = [torch.zeros_like(whole[..., 0, :])]
        for n in range(1, count):
            found.append(found[-1] / 2 + mass[:, None, :, n - 1].sum(0, keepdim=True))
        return torch.stack(found, -2)
    return {
        "oldest": age, "newest": -age, "lightest": whole, "hindsight": mass[:, None].sum(0, keepdim=True),
        "layered": known, "early": age + depth, "late": age - depth, "values": age - side * count,
        "keys": age + side * count, "light-values": whole - side * (whole.max() + 1),
    }[order]  # fmt: skip


def keep(score: torch.Tensor, share: float, floor: int, layers: int) -> tuple[torch.Tensor, float]:
    """Return the blocks that keep their residuals, as `Kept`, and their share of all blocks older than the floor."""
    count, units = score.shape[-1], score.shape[0] * score.shape[1]
    n, b = torch.arange(count)[:, None], torch.arange(count)
    older = (n + 1 - floor).clamp_min(0)
    flat = score.masked_fill(b >= older, -torch.inf).permute(2, 3, 0, 1, 4).flatten(2)
    rank = flat.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    chosen = (rank < (share * units * older).round()).unflatten(-1, (*score.shape[:2], count)).permute(2, 3, 0, 1, 4)
    actual = float(chosen.double().mean((0, 1, 2)).sum() / older.sum().clamp_min(1))
    whole = (chosen | ((b > n - floor) & (b <= n))).expand(layers, 2, -1, -1, -1)
    return whole, actual


@dataclass
class Batch:
    """Sequences of one length, with the results of a 16-bit cache."""

    names: list[str]
    tokens: torch.Tensor
    bases: list[Base]
    mass: torch.Tensor
    hit: int
    """Number of first tokens that come from the prefix cache, in 16 bits; only the tokens after them are compared."""


def prepare(probe: Elastic, texts: list[Sequence], hit: int = 0) -> list[Batch]:
    """Run the 16-bit cache over the texts, in batches of one length."""
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
            batches.append(Batch(names, tokens, bases, torch.stack(probe.mass), hit))
    return batches


def measure(out: Path, model: str, name: str, probe: Elastic, batches: list[Batch], chosen: Chosen) -> None:
    """Measure the row `name` and write it to the file `out`, unless the file has it."""
    if not batches or (out.exists() and name in json.loads(out.read_text()).get(model, {})):
        return
    tally, shares, began = Tally(), [], time.monotonic()
    for batch in batches:
        kept, share = chosen(batch.mass)
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
    add("--floors", nargs="+", type=int, default=[1, 2], help="newest blocks that keep their residuals")
    add("--texts", type=Path, required=True, help="folder of the texts' tokens; made if it is missing")
    add("--cut", action="store_true", help="make the folder of --texts, and do nothing else")
    add("--tokens", type=int, help="longest sequence, to try the program")
    add("--sequences", type=int, help="number of sequences, to try the program")
    add("--calibrate", type=int, default=CHUNK, help="tokens from which the factors come (default: %(default)s)")
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
        texts = [
            (name, tokens[: asked.tokens].to(asked.device)) for name, tokens in torch.load(file)[: asked.sequences]
        ]
        probe = Elastic(folder)
        probe.calibrate(asked.calibrate)
        row = partial(measure, asked.out, model)

        def kept(order: str, share: float, floor: int, layers: int = len(probe.full)) -> Chosen:
            return lambda mass: keep(scores(order, mass), share, floor, layers)

        batches = [batch for hit in HITS for batch in prepare(probe, texts, hit)]
        row(f"hit {TODAY}", probe, batches, lambda _mass: (TODAY, 0.0))
        for share in asked.shares:
            row(f"hit oldest {share:g} floor 1", probe, batches, kept("oldest", share, 1))
        batches = prepare(probe, texts)
        row(TODAY, probe, batches, lambda _mass: (TODAY, 0.0))
        for floor, order, share in product(asked.floors, asked.orders, asked.shares):
            order = "oldest" if share in (0, 1) else order  # then all orders are one
            row(f"{order} {share:g} floor {floor}", probe, batches, kept(order, share, floor))


if __name__ == "__main__":
    main()
