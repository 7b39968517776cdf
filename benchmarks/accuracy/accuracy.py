"""The accuracy table: `python -m benchmarks.accuracy.accuracy --out docs/benchmarks/accuracy.json`.

It computes in float32 with the real weights of SmolLM2-135M, or of Gemma 3 270M with `--model gemma3-270m`. Each row of
the table is for one codec, which encodes and decodes every key and value before attention reads it. The baseline is a
bf16 cache. The control compares two runs of the model in bf16 that differ only in the attention kernel.

`--codecs` runs only some rows (accuracy_rows.py explains their names) and merges them into `--out`. `--needle` runs the
needle task instead of the texts. accuracy_report.py makes the page. A row takes some seconds on a GPU, and two minutes
or more on one core.

If this machine lacks the documents, first run the program with `--cut` on a machine that has them. It writes the tokens
of the texts to a file, which `--texts` reads here. `--model` may then be the model's folder.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.accuracy.accuracy_model import Probe
from benchmarks.accuracy.accuracy_needle import TEXT as NEEDLE_TEXT
from benchmarks.accuracy.accuracy_needle import needles
from benchmarks.accuracy.accuracy_report import SMOLLM2
from benchmarks.accuracy.accuracy_rows import Reading, every_name, reading
from benchmarks.accuracy.accuracy_texts import Sequence, sequences
from benchmarks.accuracy.rivals import plain
from kvpilot_runtime.calibration.text import text_ids
from kvpilot_smallmodels.models import MODELS

PLAN = [
    *[(name, 1024, 2) for name in ("opticks", "manual", "reference", "code")],
    ("opticks", 1024, 1), ("reference", 2048, 1), ("manual", 4608, 1), ("code", 4608, 1),
]  # fmt: skip
"""Texts to evaluate, 20,480 tokens in all: name of the text, tokens per sequence, number of sequences."""

BUCKETS = (128, 512, 1024, 2048, 4608)
"""Upper ends of the position buckets, in tokens. The table has the KL divergence of each bucket."""


CHUNK = 8192
"""Number of tokens on which an engine calibrates itself: vLLM's default prefill chunk on a GPU."""


class Base:
    """Predictions of the 16-bit baseline for one sequence, with sums that every row of the table needs.

    Attributes:
        tokens: the sequence's token IDs.
        p: probabilities, one tensor [positions, vocabulary] for each chunk of positions.
        top: most likely token at each position.
        negentropy: sum of p log p at each position, in nats.
        log_prob: log-probability of the token that follows each position, in nats.
    """

    def __init__(self, probe: Probe, tokens: torch.Tensor, states: torch.Tensor) -> None:
        self.tokens = tokens
        self.p: list[torch.Tensor] = []
        top, negentropy, log_prob = [], [], []
        for start, logits in probe.logits(states):
            logs = logits - logits.logsumexp(-1, keepdim=True)  # torch's log_softmax has an error of 2e-5
            self.p.append(logs.exp())
            top.append(logs.argmax(-1))
            negentropy.append((self.p[-1] * logs).sum(-1))
            following = tokens[start + 1 : start + 1 + logs.shape[0]]
            log_prob.append(logs[: following.numel()].gather(1, following[:, None])[:, 0])
        self.top, self.negentropy, self.log_prob = torch.cat(top), torch.cat(negentropy), torch.cat(log_prob)


class Tally:
    """Comparison of one row (one codec) with the bf16 baseline. Each list has one value for each token.

    Attributes:
        kl: KL divergence of the row from the baseline, in thousandths of a nat.
        agree: 1 if row and baseline have the same most likely token, else 0.
        loss: log-probability of the text's next token in the baseline, minus that in the row, in nats.
        at: position in the sequence.
        text: name of the text.
    """

    def __init__(self) -> None:
        self.kl: list[torch.Tensor] = []
        self.agree: list[torch.Tensor] = []
        self.loss: list[torch.Tensor] = []
        self.at: list[torch.Tensor] = []
        self.text: list[str] = []

    def add(self, name: str, base: Base, states: torch.Tensor, probe: Probe) -> None:
        """Compare one sequence with the baseline.

        Args:
            name: name of the text.
            base: the baseline's predictions for the sequence.
            states: the row's last hidden states [tokens, hidden].
            probe: the model, which computes logits.
        """
        for p, (start, logits) in zip(base.p, probe.logits(states), strict=True):
            part = slice(start, start + logits.shape[0])
            whole = logits.logsumexp(-1)
            # KL(p || q) = sum p log p - sum p logit_q + logsumexp(logit_q). `sum` adds pairwise. A dot product would
            # add 49,152 terms one after another, with an error of about 0.001 nats.
            cross = (p * logits).sum(-1)
            self.kl.append((base.negentropy[part] - cross + whole) * 1000)
            self.agree.append((base.top[part] == logits.argmax(-1)).float())
            following = base.tokens[start + 1 : start + 1 + logits.shape[0]]
            known = following.numel()
            own = logits[:known].gather(1, following[:, None])[:, 0] - whole[:known]
            self.loss.append(base.log_prob[start : start + known] - own)
            self.at.append(torch.arange(start, start + logits.shape[0]))
            self.text += [name] * logits.shape[0]

    def join(self, part: tuple[list[Any], ...]) -> None:
        """Append the lists of another `Tally`, which covers further tokens."""
        lists: tuple[list[Any], ...] = (self.kl, self.agree, self.loss, self.at, self.text)
        for mine, theirs in zip(lists, part, strict=True):
            mine += theirs

    def summary(self) -> dict[str, Any]:
        """Return the row: KL divergences in thousandths of a nat; agreement and change of perplexity in percent."""
        kl, at = torch.cat(self.kl), torch.cat(self.at)
        buckets, start = {}, 0
        for end in BUCKETS:
            inside = (at >= start) & (at < end)
            if inside.any():
                buckets[f"{start}-{end}"] = round(float(kl[inside].mean()), 2)
            start = end
        texts = sorted(set(self.text))
        of = {t: torch.tensor([u == t for u in self.text]) for t in texts}
        return {
            "tokens": kl.numel(),
            "mean_kl": round(float(kl.mean()), 2),
            "standard_error": round(float(kl.std() / kl.numel() ** 0.5), 2),
            "p99_kl": round(float(kl.quantile(0.99)), 1),
            "top1": round(100 * float(torch.cat(self.agree).mean()), 2),
            "perplexity_change": round(100 * float(torch.cat(self.loss).mean().exp() - 1), 2),
            "buckets": buckets,
            "texts": {t: round(float(kl[of[t]].mean()), 2) for t in texts},
        }


def compare(probe: Probe, texts: list[Sequence], rows: dict[str, Reading], raw: Path,
            done: Callable[[dict[str, Any]], None]) -> None:  # fmt: skip
    """Evaluate every row of the table on each sequence.

    Args:
        probe: the model.
        texts: the sequences.
        rows: how each row reads its cache, by name.
        raw: folder that keeps the result of each row on each sequence. So a stopped run can continue, and several
            processes can share the work.
        done: callback that gets the figures of all rows so far, after each sequence.
    """
    tallies = {name: Tally() for name in rows}
    base_codec = plain.bf16()
    for number, (text, tokens) in enumerate(texts):
        base = None
        for name, row in rows.items():
            kept = raw / f"{number}_{name}.pt"
            if not kept.exists():
                base = base or Base(probe, tokens, probe.hidden(tokens, Reading(lambda _layer: base_codec)))
                part = Tally()
                part.add(text, base, probe.hidden(tokens, row), probe)
                scratch = kept.with_suffix(".part")
                torch.save((part.kl, part.agree, part.loss, part.at, part.text), scratch)
                scratch.replace(kept)
            tallies[name].join(torch.load(kept))
        done({name: tally.summary() for name, tally in tallies.items()})


def control(folder: Path, texts: list[Sequence]) -> dict[str, Any]:
    """Compare two bf16 runs whose attention kernels differ, as an engine's kernels for prefill and decode do."""
    probe, tally = Probe(folder, torch.bfloat16), Tally()
    for text, tokens in texts:
        probe.rounded = False
        base = Base(probe, tokens, probe.hidden(tokens, None))
        probe.rounded = True
        tally.add(text, base, probe.hidden(tokens, None), probe)
    return tally.summary()


def cut(tokenizer: Any) -> dict[str, list[Sequence]]:
    """Return the tokens of all texts that the benchmark reads, by the keys `evaluation` and `needle`."""
    return {"evaluation": sequences(tokenizer, PLAN), "needle": sequences(tokenizer, NEEDLE_TEXT)}


def merge(file: Path, section: str, found: dict[str, Any]) -> None:
    """Write the rows `found` into a section of the JSON file. Keep the rows of earlier runs."""
    data = json.loads(file.read_text()) if file.exists() else {}
    data.setdefault(section, {}).update(found)
    file.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Evaluate the rows, or run the needle task, as the command line requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codecs", nargs="*", help="rows to run, such as `control` (default: all)")
    parser.add_argument("--raw", type=Path, default=Path(tempfile.gettempdir(), "kvpilot-accuracy"),
                        help="folder for partial results (default %(default)s)")  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="device to compute on (default: %(default)s)")  # fmt: skip
    parser.add_argument("--model", default=SMOLLM2, help="smollm2-135m, gemma3-270m, or such a model's folder")
    parser.add_argument("--texts", type=Path, help="file that --cut has written, for a machine without the documents")
    parser.add_argument("--cut", type=Path, help="write the tokens of the texts to this file, and do nothing else")
    parser.add_argument("--needle", action="store_true", help="run the needle task instead of the texts")
    options = parser.parse_args()
    folder = MODELS[options.model](None) if options.model in MODELS else Path(options.model)
    if options.cut:
        torch.save(cut(AutoTokenizer.from_pretrained(folder)), options.cut)
        return
    merge(options.out, "model", {"name": folder.name})
    torch.set_num_threads(1)
    torch.set_default_device(options.device)
    probe = Probe(folder)
    texts = torch.load(options.texts, map_location=options.device) if options.texts else cut(probe.tokenizer)
    asked = options.codecs or ["control", *every_name()]
    ids = torch.tensor(text_ids(probe.tokenizer, CHUNK))
    factors = probe.self_calibrated(ids, probe.model.config.max_position_embeddings)
    chosen = {name: reading(name, factors) for name in asked if name != "control"}
    if options.needle:
        base = plain.bf16()
        for name, row in {"bf16": Reading(lambda _layer: base), **chosen}.items():
            merge(options.out, "needle", {name: needles(probe, row, texts["needle"][0][1])})
            print(name, flush=True)
        return
    if "control" in asked:
        merge(options.out, "texts", {"control": control(folder, texts["evaluation"])})
    if chosen:
        options.raw.mkdir(parents=True, exist_ok=True)
        compare(probe, texts["evaluation"], chosen, options.raw, lambda found: merge(options.out, "texts", found))


if __name__ == "__main__":
    main()
