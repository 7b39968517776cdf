"""The accuracy table: `python runtime/benchmarks/accuracy.py --out docs/benchmarks/accuracy.json`.

SmolLM2-135M's real weights, computed in float32; the base is a bf16 cache. Every key and value that attention sees has
been through the codec. The control compares two runs of the model in bf16 that differ in the attention kernel only.

`--codecs` takes some rows only and merges them into `--out`; `--needle` runs the needle task instead of the texts;
`--report` turns the file into docs/benchmarks/accuracy.md. One core does a row in about two minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accuracy_model import ByLayer, Probe
from accuracy_needle import needles
from accuracy_texts import CALIBRATION, sequences
from transformers import AutoTokenizer

from kvpilot_demo.models import smollm2_135m
from kvpilot_kernels import formats
from kvpilot_kernels.factors import Factors
from kvpilot_kernels.reference import plain
from kvpilot_kernels.reference.codec import Codec
from kvpilot_kernels.reference.kivi import kivi
from kvpilot_kernels.reference.kvarn import kvarn
from kvpilot_kernels.reference.own import own
from kvpilot_kernels.reference.turboquant import turboquant
from kvpilot_runtime import calibrate, calibration
from kvpilot_runtime.self_calibration import text_ids

PLAN = [
    *[(name, 1024, 2) for name in ("opticks", "manual", "reference", "code")],
    ("opticks", 1024, 1), ("reference", 2048, 1), ("manual", 4608, 1), ("code", 4608, 1),
]  # fmt: skip
"""20,480 tokens: texts, tokens a sequence, how many."""

BUCKETS = (128, 512, 1024, 2048, 4608)
"""Ends of the position buckets, in tokens."""


def rivals() -> dict[str, Codec]:
    """Codecs that need no layer."""
    found = [plain.fp8_e4m3(), plain.int4_raw(), plain.int4_per_token_head(), turboquant(4), turboquant(3), kivi(2)]
    found += [kvarn(4, v, exact_ends=exact) for v in (4, 2) for exact in (False, True)]
    return {codec.name: codec for codec in found}


SELF = "self"
"""Rows with the factors that an engine gives itself at start."""

CHUNK = 8192
"""Tokens of the pass that such an engine makes: what vLLM takes in one chunk on a GPU by default."""


def rows(layers_of: dict[str, Sequence[Factors]]) -> dict[str, ByLayer]:
    """Every row of the table: its name, and the codec of each layer. `layers_of`: factors by the label of rows."""

    def same(codec: Codec) -> ByLayer:
        return lambda _layer: codec

    table = {name: same(codec) for name, codec in rivals().items()}
    for name in formats.own_names():
        table[name] = same(own(formats.parse(name)))
    for label, layers in layers_of.items():
        for name in formats.own_names():
            fmt = formats.parse(name)
            codecs = [own(fmt, factors) for factors in layers]
            table[f"{name}+{label}"] = codecs.__getitem__
    return table


class Base:
    """The base's distributions over one sequence, and what every row needs of them."""

    def __init__(self, probe: Probe, tokens: torch.Tensor, states: torch.Tensor) -> None:
        self.tokens = tokens
        p, top, negentropy, log_prob = [], [], [], []
        for start, logits in probe.logits(states):
            logs = logits - logits.logsumexp(-1, keepdim=True)  # log_softmax is off by 2e-5 here
            p.append(logs.exp())
            top.append(logs.argmax(-1))
            negentropy.append((p[-1] * logs).sum(-1))
            following = tokens[start + 1 : start + 1 + logs.shape[0]]
            log_prob.append(logs[: following.numel()].gather(1, following[:, None])[:, 0])
        self.p, self.top = torch.cat(p), torch.cat(top)
        self.negentropy, self.log_prob = torch.cat(negentropy), torch.cat(log_prob)


class Tally:
    """Figures of one row, token by token."""

    def __init__(self) -> None:
        self.kl: list[torch.Tensor] = []
        self.agree: list[torch.Tensor] = []
        self.loss: list[torch.Tensor] = []
        self.at: list[torch.Tensor] = []
        self.text: list[str] = []

    def add(self, name: str, base: Base, states: torch.Tensor, probe: Probe) -> None:
        """Compare a run's last states [tokens, hidden] of one sequence with the base."""
        for start, logits in probe.logits(states):
            part = slice(start, start + logits.shape[0])
            whole = logits.logsumexp(-1)
            # KL(p || q) = sum p log p - sum p logit_q + logsumexp(logit_q). A sum in pairs, not a dot product: that
            # adds 49,152 terms one after the other, and is off by millinats.
            cross = (base.p[part] * logits).sum(-1)
            self.kl.append((base.negentropy[part] - cross + whole) * 1000)
            self.agree.append((base.top[part] == logits.argmax(-1)).float())
            following = base.tokens[start + 1 : start + 1 + logits.shape[0]]
            known = following.numel()
            own = logits[:known].gather(1, following[:, None])[:, 0] - whole[:known]
            self.loss.append(base.log_prob[start : start + known] - own)
            self.at.append(torch.arange(start, start + logits.shape[0]))
            self.text += [name] * logits.shape[0]

    def join(self, part: tuple[list[Any], ...]) -> None:
        """Add what another tally held: its five lists."""
        for mine, theirs in zip((self.kl, self.agree, self.loss, self.at, self.text), part, strict=True):
            mine += theirs

    def summary(self) -> dict[str, Any]:
        """The row: divergences in millinats, agreement in percent, perplexity change in percent."""
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


def compare(probe: Probe, plan: list[tuple[str, int, int]], codecs: dict[str, ByLayer], raw: Path,
            done: Callable[[dict[str, Any]], None]) -> None:  # fmt: skip
    """Run all sequences, codecs inside, and hand over the rows after each sequence.

    What one codec gave on one sequence is kept in a file of `raw`, and not computed again: several processes can share
    the work, and a run that was stopped goes on.
    """
    tallies = {name: Tally() for name in codecs}
    base_codec = plain.bf16()
    for number, (text, tokens) in enumerate(sequences(probe.tokenizer, plan)):
        base = None
        for name, codec in codecs.items():
            kept = raw / f"{number}_{name}.pt"
            if not kept.exists():
                base = base or Base(probe, tokens, probe.hidden(tokens, lambda _layer: base_codec))
                part = Tally()
                part.add(text, base, probe.hidden(tokens, codec), probe)
                scratch = kept.with_suffix(".part")
                torch.save((part.kl, part.agree, part.loss, part.at, part.text), scratch)
                scratch.replace(kept)
            tallies[name].join(torch.load(kept))
        done({name: tally.summary() for name, tally in tallies.items()})


def control(folder: Path, plan: list[tuple[str, int, int]]) -> dict[str, Any]:
    """bf16 against bf16: the same weights through two kernels of attention, as prefill and decode are in an engine."""
    probe, tally = Probe(folder, torch.bfloat16), Tally()
    for text, tokens in sequences(probe.tokenizer, plan):
        probe.rounded = False
        base = Base(probe, tokens, probe.hidden(tokens, None))
        probe.rounded = True
        tally.add(text, base, probe.hidden(tokens, None), probe)
    return tally.summary()


def calibrations(folder: Path, where: Path) -> dict[str, Path]:
    """Make the calibration files of the table as a user would: prompts in a file, then `kvpilot calibrate`."""
    tokenizer, made = AutoTokenizer.from_pretrained(folder), {}
    for label, plan in CALIBRATION.items():
        made[label] = where / f".{label}.safetensors"
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as prompts:
            for _, tokens in sequences(tokenizer, plan):
                prompts.write(json.dumps({"text": tokenizer.decode(tokens)}) + "\n")
            prompts.flush()
            calibrate.run(folder, Path(prompts.name), made[label], length=4096, tokens=16384, device="cpu")
    return made


def merge(file: Path, section: str, found: dict[str, Any]) -> None:
    """Put rows into the JSON file, keeping what others wrote."""
    data = json.loads(file.read_text()) if file.exists() else {}
    data.setdefault(section, {}).update(found)
    file.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codecs", nargs="*", help="rows to run, `control` among them; default: all")
    parser.add_argument("--calibration", nargs="*", help="LABEL=FILE: rows `k4v4+LABEL`; default: calibrate anew")
    parser.add_argument("--raw", type=Path, default=Path(tempfile.gettempdir(), "kvpilot-accuracy"),
                        help="where partial results are kept (default %(default)s)")  # fmt: skip
    parser.add_argument("--device", default="cpu", help="where to compute, such as cuda (default %(default)s)")
    parser.add_argument("--needle", action="store_true", help="the needle task instead of the texts")
    parser.add_argument("--report", type=Path, help="write this Markdown file from --out, and do nothing else")
    options = parser.parse_args()
    if options.report:
        from accuracy_report import markdown

        options.report.write_text(markdown(json.loads(options.out.read_text()), table_bits))
        return
    torch.set_num_threads(1)
    torch.set_default_device(options.device)
    folder = smollm2_135m()
    if options.calibration is None:
        files = calibrations(folder, options.out.parent)
    else:
        files = {label: Path(file) for label, _, file in (item.partition("=") for item in options.calibration)}
    facts = calibration.ModelFacts.read(folder)
    probe = probe_of(folder)
    text = torch.tensor(text_ids(probe.tokenizer, CHUNK))
    table = rows(
        {
            SELF: probe.self_calibrated(text),
            **{name: calibration.load(file, facts).layers for name, file in files.items()},
        }
    )
    asked = options.codecs or ["control", *table]
    chosen = {name: table[name] for name in asked if name != "control"}
    if options.needle:
        base = plain.bf16()
        for name, codec in {"bf16": lambda _layer: base, **chosen}.items():
            merge(options.out, "needle", {name: needles(probe_of(folder), codec)})
            print(name, flush=True)
        return
    if "control" in asked:
        merge(options.out, "texts", {"control": control(folder, PLAN)})
    if chosen:
        options.raw.mkdir(parents=True, exist_ok=True)
        compare(probe_of(folder), PLAN, chosen, options.raw, lambda found: merge(options.out, "texts", found))


_PROBES: dict[Path, Probe] = {}


def probe_of(folder: Path) -> Probe:
    """The float32 model, loaded once."""
    if folder not in _PROBES:
        _PROBES[folder] = Probe(folder)
    return _PROBES[folder]


def table_bits(name: str, head_dim: int) -> float:
    """Bits per element of a row, scales counted."""
    known = rivals()
    return known[name].bits(head_dim) if name in known else formats.parse(name.split("+")[0]).bits_per_element(head_dim)


if __name__ == "__main__":
    main()
