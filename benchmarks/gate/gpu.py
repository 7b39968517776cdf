"""Measure the time of a whole gate on one GPU: `python -m benchmarks.gate.gpu --max-model-len 32768`.

Two `vllm serve` with dummy weights share the GPU: a 16-bit one and a canary. The program calls the same functions with
the same packs and settings as the operator: it records the 16-bit answers and their control, measures the canary, and
fills the canary's context and KV pool.

Random weights differ from a real model in two ways. First, the canary may fail after a few prompts. So the limits are
wider than any damage, and every prompt is sent. Second, both engines may always choose equal tokens. A real 4-bit cache
differs about every tenth token, and each difference costs a request. So the program changes every tenth token of the
16-bit answers. It writes its JSON file after each stage.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.accuracy.gpu_options import tokenizer
from benchmarks.engine.gpu_engine_process import say, versions
from benchmarks.engine.gpu_engine_shapes import SHAPES, write
from benchmarks.engine.gpu_users import server, started
from kvpilot_operator.api.rollout import Accuracy, Canary
from kvpilot_operator.decide import described, judge
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_probes import codec, packs, pressure, run
from kvpilot_probes.client import http_client
from kvpilot_probes.codec import Baseline, BaselinePrompt
from kvpilot_probes.errors import ProbeError
from kvpilot_probes.pressure import Pool
from kvpilot_probes.sequential import Allowed
from kvpilot_probes.session import Settings
from kvpilot_probes.stats import Answers, Logprobs

CAPTURING = Settings()
MEASURING = Settings(budget_seconds=Canary().progress_deadline_seconds / 2)
"""The settings of the operator's `Prober` for a replica without users."""
UNLIMITED = Allowed(kl=1000.0, disagreement=1.0)
GIB = 1 << 30
# Roles only, because a model with random weights needs no real template.
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-model-len", type=int, default=32768, help="context in tokens (default: 32768)")
    parser.add_argument("--packs", nargs="+", default=Accuracy().probe_sets, help="default: the operator's")
    parser.add_argument("--dtype", default="k4v4", help="KV-cache dtype of the canary (default: k4v4)")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument(
        "--differ-every", type=int, default=10, help="number of tokens between two differences (default: 10)"
    )
    parser.add_argument(
        "--limit", type=float, default=570, help="time limit in seconds, including the start of the engines"
    )
    # A fixed size lets both engines start at the same time: neither counts the other's memory as its own.
    parser.add_argument("--kv-gib", type=float, nargs=2, default=(40, 16), metavar=("STABLE", "CANARY"),
                        help="GiB of KV cache of each engine (default: 40 16)")  # fmt: skip
    parser.add_argument("--serve", action="append", default=[], metavar="OPTION[=VALUE]",
                        help="further option of both `vllm serve`, without dashes; may be repeated")  # fmt: skip
    parser.add_argument("--port", type=int, default=8200, help="port of the first server (default: 8200)")
    parser.add_argument("--out", type=Path, default=Path("gate-gpu.json"))
    return parser.parse_args()


class Record:
    """The figures so far, in a JSON file that is written after each stage."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._out, self._began = args.out, time.monotonic()
        self.facts: dict[str, Any] = {
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
            "command": " ".join(["python", "-m", "benchmarks.gate.gpu", *sys.argv[1:]]), **versions(),
            "shape": args.shape, "dtype": args.dtype, "max_model_len": args.max_model_len, "packs": list(args.packs),
            "differ_every": args.differ_every, "stages": {}, "error": "interrupted",
        }  # fmt: skip

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Time the `with` block, and yield the dictionary for its figures."""
        say(f"{name}: starts")
        row: dict[str, Any] = {}
        self.facts["stages"][name] = row
        began = time.monotonic()
        try:
            yield row
        finally:
            row["seconds"] = round(time.monotonic() - began, 1)
            self.write()
            say(f"{name}: {row}")

    def write(self) -> None:
        """Write the file, with the seconds since the program's start."""
        self.facts["seconds_in_all"] = round(time.monotonic() - self._began, 1)
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self.facts, indent=1) + "\n")


async def gate(args: argparse.Namespace, record: Record, stable: str, canary: str) -> None:
    """Run the gate's stages on two running engines."""
    facts = record.facts
    with record.stage("capture"):
        prompts = packs.load(args.packs)
        kept = await run.capture(stable, "m", prompts, identity="gate", dtype="auto", settings=CAPTURING)
        facts["buckets"], facts["left_out"] = buckets(kept), list(kept.left_out)
        facts["longest_context"] = max(len(p.tokens) + len(p.answer) for p in kept.prompts)
    with record.stage("control") as row:
        noise = await run.control(stable, "m", kept, settings=CAPTURING)
        row.update(requests=noise.requests, tokens=noise.tokens)
    kept = codec.with_control(kept, noise, datetime.now(UTC))
    apart = different(kept, args.differ_every)
    with record.stage("measure") as row:
        found = await run.measure(canary, "m", apart, allowed=UNLIMITED, settings=MEASURING)
        row.update(requests=found.requests, tokens=found.tokens, prompts=found.prompts)
    judged = judge(found, described(kept), Accuracy())
    facts["verdict"] = {"verdict": judged.verdict, "reason": judged.reason, "message": judged.message}
    with record.stage("pressure") as row:
        scraper = Scraper(None)

        async def look() -> Pool:
            page = await scraper.scrape(ServiceKey("default", "gate"), canary, lambda _: None)
            row["pool_tokens"] = page.capacity_tokens
            row["fullest"] = round(max(page.usage, row.get("fullest", 0.0)), 3)
            return Pool(page.capacity_tokens, page.usage)

        try:
            filled = await pressure.fill(canary, "m", kept, look=look, allowed=UNLIMITED, settings=MEASURING)
        finally:
            await scraper.close()
        row.update(context=filled.context, prompts=len(filled.seen), tokens=filled.tokens)


def different(kept: Baseline, every: int) -> Baseline:
    """Return a baseline whose greedy token is its second choice at every `every`-th position of an answer."""

    def changed(answer: Sequence[Logprobs]) -> Answers:
        pairs = enumerate(answer, 1)
        return Answers(Logprobs(list(one.top)[1], one.top) if at % every == 0 else one for at, one in pairs)

    return replace(kept, prompts=tuple(replace(p, answer=changed(p.answer)) for p in kept.prompts))


def buckets(kept: Baseline) -> dict[str, dict[str, int]]:
    """Return the number of prompts of each bucket, their tokens without answers, and the tokens of the longest one."""
    found: dict[str, list[BaselinePrompt]] = defaultdict(list)
    for prompt in kept.prompts:
        found[prompt.bucket].append(prompt)
    lengths = {bucket: [len(prompt.tokens) for prompt in prompts] for bucket, prompts in found.items()}
    return {name: {"prompts": len(all_), "tokens": sum(all_), "longest": max(all_)} for name, all_ in lengths.items()}


async def measured(args: argparse.Namespace, record: Record, model: Path, folder: Path) -> None:
    """Start both engines, and run the gate until the time limit."""
    places = {}
    for place, dtype in enumerate(("auto", args.dtype)):
        options: dict[str, object] = {
            "served-model-name": "m", "kv-cache-dtype": dtype, "max-model-len": args.max_model_len,
            "gpu-memory-utilization": 0.44, "kv-cache-memory-bytes": int(args.kv_gib[place] * GIB),
        }  # fmt: skip
        options |= {name: value or True for name, _, value in (one.partition("=") for one in args.serve)}
        log = folder / f"gate-{place}-{dtype}.log"
        places[log] = server(model, args.port + place, 0, log, options)
    (first, stable), (second, canary) = places.items()
    async with asyncio.timeout(args.limit):
        with stable as (url, child), canary as (other_url, other):
            async with http_client() as session:
                with record.stage("start"):
                    await started(session, url, child, first)
                    await started(session, other_url, other, second)
            await gate(args, record, url, other_url)


def main() -> int:
    """Run the gate. Return 1 if it did not end in time."""
    args = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # On SIGTERM, the servers end, too.
    record = Record(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvpilot-model-") as scratch:
        shape = SHAPES[args.shape]
        model = write(Path(scratch, "model"), shape, shape.layers, args.max_model_len)
        tokenizer(model, shape.vocab)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        try:
            asyncio.run(measured(args, record, model, args.out.parent))
            record.facts["error"] = None
        except TimeoutError:
            record.facts["error"] = f"not done after {args.limit:.0f} s"
        except (ProbeError, RuntimeError, OSError) as failure:
            record.facts["error"] = f"{type(failure).__name__}: {failure}"
        finally:
            record.write()
    print(json.dumps(record.facts, indent=1))
    return 1 if record.facts["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
