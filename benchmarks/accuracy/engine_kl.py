"""KL divergence of a KV cache in real vLLM, with every position decoded.

    python -m benchmarks.accuracy.engine_kl --out FILE

The accuracy table (accuracy.py) models an engine, whereas this program runs a real one. It makes vLLM answer with the
table's texts, so that every position is a decode step over pages. A second engine with a 16-bit cache gets the
same texts. The program records the hidden state after the last norm at every position. From the states of both engines
it computes their distributions over the whole vocabulary, and the KL divergence. As a check, it compares the
distributions with the log-probabilities that the engines report.

Rows have the names of the table's rows, and also show the table's figure for the same tokens. The control is a second
run of the 16-bit engine, which prefills each text at once. If an engine fails, the program reports it and writes the
other rows. On a GPU `fp8_e4m3` needs `--dtype bfloat16`. `--hit N` measures the 64 tokens after a hit of N tokens in
the prefix cache. engine_kl_report.py makes the page.
"""

import argparse
import hashlib
import json
import re
import shlex
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.accuracy import PLAN, Base, Tally
from benchmarks.accuracy.accuracy_model import Probe
from benchmarks.accuracy.accuracy_rows import BLOCK, Reading, engine, reading
from benchmarks.accuracy.accuracy_texts import Sequence, sequences
from benchmarks.accuracy.engine_kl_run import Job
from benchmarks.accuracy.rivals import plain
from benchmarks.engine.gpu_engine_process import ChildFailedError, environment, run_child, say
from kvpilot_runtime.calibration.text import text_ids
from kvpilot_smallmodels.models import smollm2_135m

ROWS = "k4v4+self+w64,k8v4+self+w64,k4v2+self+w128,k4v4+self,int8+self"
AFTER_HIT = 64
"""Number of tokens to measure after a prefix hit. The recent windows of all these tokens still reach into
the hit, because the shortest window has 64 tokens."""

CONTEXT = 8192
"""Largest context that the engines serve, in tokens."""

MEMORY = 2 << 30
"""Size of an engine's KV cache in bytes: twice the size of all texts' keys and values in 32 bits."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file into which the figures are merged")
    parser.add_argument("--rows", default=ROWS, help="rows of the table, comma-separated (default: %(default)s)")
    parser.add_argument("--hit", type=int, default=0, help="number of tokens from the prefix cache, in whole blocks")
    parser.add_argument("--sequences", type=int, help="number of the table's texts to use (default: all)")
    parser.add_argument(
        "--tokens", type=int, default=CONTEXT, help="largest number of tokens of a text (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", help="dtype of weights and baseline cache (default: float16 on a GPU, float32 on a CPU)"
    )
    parser.add_argument(
        "--chunk", type=int, default=8192, help="number of tokens that an engine calibrates on (default: %(default)s)"
    )
    parser.add_argument("--at-once", type=int, default=1, help="number of engines that run at the same time")
    parser.add_argument("--model", type=Path, help="folder of the model (default: SmolLM2-135M, made once)")
    parser.add_argument("--texts", type=Path, help="file that accuracy.py --cut has written")
    parser.add_argument(
        "--limit", type=float, default=1800, help="seconds that an engine may take (default: %(default)s)"
    )
    parser.add_argument(
        "--raw", type=Path, help="folder that keeps each engine's answers; kept answers are not computed again"
    )
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    return parser.parse_args()


def answers(args: argparse.Namespace, name: str, texts: list[Sequence]) -> dict[str, Any]:
    """Return the results of one engine for every text, or its error. `name` is a row, `base` or `control`."""
    dtype, extra = ("auto", {}) if name in ("base", "control") else engine(name)
    options = {
        "model": str(args.model), "kv_cache_dtype": dtype, "dtype": args.dtype, "max_model_len": args.context,
        "max_num_batched_tokens": args.chunk, "max_num_seqs": len(texts) + 1, "kv_cache_memory_bytes": MEMORY,
        "block_size": BLOCK, **args.engine_args,
    }  # fmt: skip
    extra = {**extra, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    log = args.out.with_name(f"{args.out.stem}-{name}.log")
    with tempfile.TemporaryDirectory(prefix="kvpilot-kl-") as folder, environment(extra) as env:
        out, job = Path(folder, "answers.pt"), Path(folder, "job.json")
        asked = asdict(Job(options, [x.tolist() for _, x in texts], args.hit, name != "control", str(out)))
        key = hashlib.sha256(json.dumps([{**asked, "out": name}, extra], sort_keys=True).encode()).hexdigest()[:16]
        kept = args.raw and args.raw / f"{name}-{key}.pt"
        if kept and kept.exists():
            return dict(torch.load(kept, map_location=args.device))
        job.write_text(json.dumps(asked))
        say(f"{name}: starting")
        try:
            run_child("benchmarks.accuracy.engine_kl_run", job, log, args.limit, env)
        except ChildFailedError as error:
            return {"error": str(error)}
        found: dict[str, Any] = torch.load(out, map_location=args.device)
    said = re.findall(r"(?:Calibrat|Recent window)[^\n\x1b]*", log.read_text())
    found["said"] = list(dict.fromkeys(line.strip() for line in said))
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, kept)
    return found


def unlike(probe: Probe, found: dict[str, Any], texts: list[Sequence], hit: int) -> float:
    """Return the largest difference, in nats, between log-probabilities of an engine and of its recorded states.

    Leave out the first `hit` tokens of each text. A small difference shows that the recorded states are right.
    """
    worst = 0.0
    for (_, tokens), answer in zip(texts, found["answers"], strict=True):
        own = Base(probe, tokens[hit:], answer["states"].float()).log_prob
        worst = max(worst, float((own - answer["logprobs"]).abs().max()))
    return round(worst, 3)


def modelled(probe: Probe, row: Reading, texts: list[Sequence], hit: int) -> dict[str, Any]:
    """Return the results of the accuracy table's model for the tokens of each text after the first `hit` tokens."""
    tally, base_codec = Tally(), plain.bf16()
    base_row = Reading(lambda _layer: base_codec)
    for text, tokens in texts:
        base = Base(probe, tokens[hit:], probe.hidden(tokens, base_row)[hit:])
        tally.add(text, base, probe.hidden(tokens, replace(row, hit=hit))[hit:], probe)
    return tally.summary()


def compared(probe: Probe, found: dict[str, Any], base: dict[str, Any], texts: list[Sequence], hit: int) -> Any:
    """Compare an engine's results (`found`) with the 16-bit engine's (`base`), after `hit` tokens of each text."""
    tally = Tally()
    for (text, tokens), answer, reference in zip(texts, found["answers"], base["answers"], strict=True):
        of_base = Base(probe, tokens[hit:], reference["states"].float())
        tally.add(text, of_base, answer["states"].float(), probe)
    return tally.summary()


def cut(args: argparse.Namespace, probe: Probe) -> list[Sequence]:
    """Return the texts. With `--hit`, cut them into pieces of `hit` + `AFTER_HIT` tokens."""
    whole = torch.load(args.texts)["evaluation"] if args.texts else sequences(probe.tokenizer, PLAN)
    whole = [(name, tokens[: args.tokens].to(args.device)) for name, tokens in whole[: args.sequences]]
    if not args.hit:
        return whole
    size = args.hit + AFTER_HIT
    return [(name, piece) for name, tokens in whole for piece in tokens.split(size) if len(piece) == size]


def command_line(words: list[str]) -> str:
    """Return the command line without the names of this machine's folders."""
    kept = list(words)
    for option in ("--out", "--model", "--texts", "--raw"):
        if option in kept:
            at = kept.index(option)
            del kept[at : at + 2]
    return shlex.join(["python", "-m", "benchmarks.accuracy.engine_kl", *kept])


def main() -> None:
    """Run the engines and the table's model, print the rows and write them."""
    args = arguments()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_device(args.device)  # torch applies this setting to the current thread only
    args.dtype = args.dtype or ("float16" if args.device == "cuda" else "float32")
    args.model = args.model or smollm2_135m()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    probe = Probe(args.model)
    args.context = min(CONTEXT, probe.model.config.max_position_embeddings)
    texts = cut(args, probe)
    rows = args.rows.split(",")
    chosen = {name: engine(name) for name in rows}  # Find rows that no engine can serve before any engine starts.
    with ThreadPoolExecutor(args.at_once) as pool:
        names = ["base", *([] if args.hit else ["control"]), *chosen]
        found = dict(zip(names, pool.map(lambda name: answers(args, name, texts), names), strict=True))
    ids = torch.tensor(text_ids(probe.tokenizer, min(args.chunk, args.context)))
    factors = probe.self_calibrated(ids, args.context)
    table = {}
    if error := found["base"].get("error"):
        raise ChildFailedError(f"base: {error}")
    for name in names[1:]:
        if error := found[name].get("error"):
            say(f"{name}: {error}")
            continue
        engine_row = compared(probe, found[name], found["base"], texts, args.hit)
        block = args.engine_args.get("block_size", BLOCK)
        model_row = None if name == "control" else modelled(probe, reading(name, factors, block), texts, args.hit)
        table[name] = {
            "engine": engine_row, "model": model_row, "said": found[name]["said"],
            "unlike": unlike(probe, found[name], texts, args.hit),
        }  # fmt: skip
        say(f"{name}: engine {engine_row['mean_kl']}, model {model_row and model_row['mean_kl']} millinats")
    section = {
        "commands": [command_line(sys.argv[1:])], "date": f"{datetime.now(UTC):%Y-%m-%d}", "dtype": args.dtype,
        "hit": args.hit, "versions": found["base"]["versions"], "rows": table,
    }  # fmt: skip
    data = json.loads(args.out.read_text()) if args.out.exists() else {}
    key = f"{section['versions']['device']}, {args.dtype}" + (f", after a hit of {args.hit}" if args.hit else "")
    positions = sum(len(tokens) - args.hit for _, tokens in texts)
    former = data.get(key, {"rows": {}, "commands": []})
    kept = {name: row for name, row in former["rows"].items() if row["engine"]["tokens"] == positions}
    if kept.keys() - table.keys():
        section["rows"] = kept | table
        section["commands"] = list(dict.fromkeys([*former["commands"], *section["commands"]]))
    data[key] = section
    args.out.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    if len(table) < len(names) - 1:
        sys.exit("not every engine answered; see above")


if __name__ == "__main__":
    main()
