"""Run the accuracy gate between two engines on one GPU: `python -m benchmarks.gate.gpu --max-model-len 32768`.

Two `vllm serve` share the GPU: a 16-bit one and a canary. The program calls the same functions with the same packs and
settings as the operator: it records the 16-bit answers and their control, measures the canary, and fills the canary's
context and KV pool. With `--serving`, it probes the canary as the operator probes a serving replica in each period.

* **Time.** Without `--model`, the weights are random and the verdict means nothing. The program makes the run as long
  as with real weights, in two ways. First, random weights may fail the canary after a few prompts. So the limits are
  wider than any damage, and every prompt is sent. Second, with random weights both engines may choose the same tokens
  everywhere. With a real 4-bit cache about every tenth token differs, and each difference costs a request. So the
  program changes every tenth token of the 16-bit answers.
* **False alarms.** With `--model`, the weights are real, so a failed gate is a false alarm. Each of the `--gates` has
  other prompts: a seed of its own determines the long texts, and a text before each written prompt.
* **Users.** `--users` hold conversations with both engines, and with `--serving` only with the canary. The
  record then also has the latencies of these users between two probes.

The program writes its JSON file after each stage.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.accuracy.gpu_options import tokenizer
from benchmarks.engine.gpu_engine_process import say
from benchmarks.engine.gpu_engine_shapes import SHAPES, write
from benchmarks.engine.gpu_users import server, started
from benchmarks.engine.users import ARRIVAL_SECONDS, Crowd, Load, Turn, pauses, quantiles
from benchmarks.gate.record import Record, figures
from kvpilot_operator.api.rollout import Accuracy, Canary
from kvpilot_operator.api.words import Verdict
from kvpilot_operator.control.prober import GIVE_WAY_SECONDS, LOW_PRIORITY, SHORTEST_BUDGET_SECONDS
from kvpilot_operator.decide import Judgement, allowed, described, judge
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_probes import codec, packs, pressure, prose, run
from kvpilot_probes.client import http_client
from kvpilot_probes.codec import Baseline
from kvpilot_probes.errors import ProbeError
from kvpilot_probes.packs import ProbePrompt
from kvpilot_probes.pressure import Pool
from kvpilot_probes.sequential import Allowed
from kvpilot_probes.session import GiveWay, Settings
from kvpilot_probes.stats import Answers, Logprobs, Measurement

CAPTURING = Settings()
MEASURING = Settings(budget_seconds=Canary().progress_deadline_seconds / 2)
"""Settings of the operator's `Prober` for a replica without users. For a serving replica, see `Pair._periodic`."""
UNLIMITED = Allowed(kl=1000.0, disagreement=1.0)
GIB = 1 << 30
SERVICE = ServiceKey("default", "gate")
USUAL_CONTEXT = 16384
"""Context in tokens that the users' usual conversations need. With a shorter context, conversations are shorter."""
ALONE_SECONDS = 60.0
"""Seconds before each periodic probe, in which the latencies of users without a probe are measured."""
# A minimal chat template is enough for random weights.
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-model-len", type=int, default=32768, help="context in tokens (default: 32768)")
    parser.add_argument("--packs", nargs="+", default=Accuracy().probe_sets, help="default: the operator's")
    parser.add_argument("--dtype", default="k4v4", help="KV-cache dtype of the canary (default: k4v4)")
    parser.add_argument("--model", type=Path, help="folder of a real model (default: random weights of --shape)")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--differ-every", type=int, default=10,
                        help="tokens between two differences, with random weights (default: 10)")  # fmt: skip
    parser.add_argument("--max-excess-kl-millinats", type=int, default=Accuracy().max_excess_kl_millinats)
    parser.add_argument("--min-top1-agreement-percent", type=int, default=Accuracy().min_top1_agreement_percent)
    parser.add_argument("--gates", type=int, default=1, help="number of gates, at most (default: 1)")
    parser.add_argument("--seed", type=int, default=20, help="seed of the first gate; each gate adds 3 (default: 20)")
    parser.add_argument("--users", type=int, default=0, help="users of the engines (default: 0)")
    parser.add_argument("--serving", action="store_true", help="probe the canary as a serving replica")
    parser.add_argument("--limit", type=float, default=570, help="seconds in all, engines' start included")
    # A fixed size lets both engines start at the same time: neither counts the other's memory as its own.
    parser.add_argument("--kv-gib", type=float, nargs=2, default=(40, 16), metavar=("STABLE", "CANARY"),
                        help="GiB of KV cache of each engine (default: 40 16)")  # fmt: skip
    parser.add_argument("--serve", action="append", default=[], metavar="OPTION[=VALUE]",
                        help="further option of both `vllm serve`, without dashes; may be repeated")  # fmt: skip
    parser.add_argument("--gpu", type=int, default=0, help="number of the GPU (default: 0)")
    parser.add_argument("--port", type=int, default=8200, help="port of the first server (default: 8200)")
    parser.add_argument("--out", type=Path, default=Path("gate-gpu.json"))
    return parser.parse_args()


class Pair:
    """Two running engines, a 16-bit one and a canary, and the periods in which users' latencies count."""

    def __init__(self, args: argparse.Namespace, record: Record, stable: str, canary: str) -> None:
        self.args, self.record, self.stable, self.canary = args, record, stable, canary
        self.scraper = Scraper(None)
        self.alone: list[tuple[float, float]] = []
        self.beside: list[tuple[float, float]] = []

    async def gate(self, seed: int) -> None:
        """Run the stages of a gate, and add its figures to the record. An error of the probe is a verdict, too."""
        row: dict[str, Any] = {"seed": seed, "stages": {}}
        self.record.gates.append(row)
        began = time.monotonic()
        try:
            found, kept = await self._measured(row)
        except ProbeError as error:
            row |= {"verdict": Verdict.ERROR, "reason": type(error).__name__, "message": str(error)}
        else:
            judged = self._judge(found, kept)
            row |= figures(found, kept, judged)
        row["seconds"] = round(time.monotonic() - began, 1)
        self.record.write()
        say(f"{self.args.out.stem}: gate {seed}: {row['verdict']}, {row['message']}")

    async def _measured(self, row: dict[str, Any]) -> tuple[Measurement, Baseline]:
        stages, dummy = row["stages"], self.args.model is None
        with self.record.stage(stages, "capture"):
            prompts = seeded(packs.load(self.args.packs), row["seed"])
            capturing = replace(CAPTURING, seed=row["seed"])
            kept = await run.capture(self.stable, "m", prompts, identity="gate", dtype="auto", settings=capturing)
            row["longest_context"] = max(len(p.tokens) + len(p.answer) for p in kept.prompts)
        with self.record.stage(stages, "control") as stage:
            noise = await run.control(self.stable, "m", kept, settings=CAPTURING)
            stage.update(requests=noise.requests, tokens=noise.tokens)
        kept = codec.with_control(kept, noise, datetime.now(UTC))
        asked = different(kept, self.args.differ_every) if dummy else kept
        limits = UNLIMITED if dummy else allowed(described(kept), self._limits())
        if self.args.serving and self.args.users:
            begin = time.perf_counter()
            await asyncio.sleep(ALONE_SECONDS)
            self.alone.append((begin, time.perf_counter()))
        with self.record.stage(stages, "measure") as stage:
            settings, begin = self._periodic(row["seed"]) if self.args.serving else MEASURING, time.perf_counter()
            found = await run.measure(self.canary, "m", asked, allowed=limits, settings=settings)
            self.beside.append((begin, time.perf_counter()))
            stage.update(requests=found.requests, tokens=found.tokens, prompts=found.prompts)
        if not self.args.serving and (dummy or self._judge(found, kept).verdict == Verdict.PASSED):
            found = await self._pressed(found, asked, limits, stages)
        return found, kept

    async def _pressed(
        self, found: Measurement, kept: Baseline, limits: Allowed, stages: dict[str, Any]
    ) -> Measurement:
        with self.record.stage(stages, "pressure") as row:

            async def look() -> Pool:
                try:
                    page = await self.scraper.scrape(SERVICE, self.canary, lambda _: None)
                except ScrapeError:
                    return Pool(0, 0.0)
                row["pool_tokens"] = page.capacity_tokens
                row["fullest"] = round(max(page.usage, row.get("fullest", 0.0)), 3)
                return Pool(page.capacity_tokens, page.usage)

            filled = await pressure.fill(self.canary, "m", kept, look=look, allowed=limits, settings=MEASURING)
            row.update(context=filled.context, prompts=len(filled.seen), tokens=filled.tokens)
        return filled.added_to(found)

    def _limits(self) -> Accuracy:
        return Accuracy(
            max_excess_kl_millinats=self.args.max_excess_kl_millinats,
            min_top1_agreement_percent=self.args.min_top1_agreement_percent,
        )

    def _judge(self, found: Measurement, kept: Baseline) -> Judgement:
        return judge(found, described(kept), self._limits())

    def _periodic(self, turn: int) -> Settings:
        """Return the settings of the operator's `Prober` for a serving replica."""
        return Settings(
            concurrency=1,
            priority=LOW_PRIORITY if "scheduling-policy=priority" in self.args.serve else None,
            give_way=GiveWay(partial(self.scraper.load, SERVICE, self.canary), GIVE_WAY_SECONDS, rests=True),
            tasks=False, brief=True, turn=turn, budget_seconds=SHORTEST_BUDGET_SECONDS,
        )  # fmt: skip

    def latencies(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the canary's users' latencies with and without a probe: 50th, 95th and 99th percentile, in seconds."""
        found: dict[str, Any] = {}
        for name, periods in (("alone", self.alone), ("beside", self.beside)):
            first = [t.chunks[0] - t.sent for t in turns if t.chunks and any(a <= t.sent < b for a, b in periods)]
            gaps = [gap for period in periods for gap in pauses(turns, *period)]
            found[name] = {
                "seconds": round(sum(end - begin for begin, end in periods), 1), "questions": len(first),
                "pauses": len(gaps), "ttft": quantiles(first), "itl": quantiles(gaps),
            }  # fmt: skip
        return found


def seeded(prompts: Sequence[ProbePrompt], seed: int) -> list[ProbePrompt]:
    """Put a text that depends on the seed before each written prompt, so that each gate has other prompts."""
    text = next(prose.chapters(seed, 12)).text

    def begun(prompt: ProbePrompt) -> ProbePrompt:
        first, *others = prompt.messages
        return replace(prompt, messages=(packs.Message(first.role, f"{text}\n\n{first.content}"), *others))

    return [begun(prompt) if prompt.messages else prompt for prompt in prompts]


def different(kept: Baseline, every: int) -> Baseline:
    """Return a baseline whose greedy token is its second choice at every `every`-th position of an answer."""

    def changed(answer: Sequence[Logprobs]) -> Answers:
        pairs = enumerate(answer, 1)
        return Answers(Logprobs(list(one.top)[1], one.top) if at % every == 0 else one for at, one in pairs)

    return replace(kept, prompts=tuple(replace(p, answer=changed(p.answer)) for p in kept.prompts))


def conversation(context: int) -> Load:
    """Return the usual conversations.

    If `context` is too short for them, scale down their lengths and pauses equally.
    """
    usual, share = Load(), min(1.0, context / USUAL_CONTEXT)
    history, asked, answered = (int(share * count) for count in (usual.history, usual.asked, usual.answered))
    return Load(history, asked, answered, usual.turns, share * usual.thought)


async def measured(args: argparse.Namespace, record: Record, model: Path, folder: Path) -> None:
    """Start both engines, and run gates until the time limit."""
    places = {}
    for place, dtype in enumerate(("auto", args.dtype)):
        options: dict[str, object] = {
            "served-model-name": "m", "kv-cache-dtype": dtype, "max-model-len": args.max_model_len,
            "gpu-memory-utilization": 0.44, "kv-cache-memory-bytes": int(args.kv_gib[place] * GIB),
            "load-format": "auto" if args.model else "dummy",
        }  # fmt: skip
        options |= {name: value or True for name, _, value in (one.partition("=") for one in args.serve)}
        log = folder / f"{args.out.stem}-{place}-{dtype}.log"
        places[log] = server(model, args.port + place, args.gpu, log, options)
    (first, stable), (second, canary) = places.items()
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    async with asyncio.timeout(args.limit):
        with stable as (url, child), canary as (other_url, other):
            async with http_client() as session:
                with record.stage(record.facts, "start"):
                    await started(session, url, child, first)
                    await started(session, other_url, other, second)
            pair, crowds = Pair(args, record, url, other_url), list[Crowd]()
            try:
                if args.users:
                    for address in (other_url,) if args.serving else (other_url, url):
                        crowds.append(Crowd(address, "m", conversation(args.max_model_len), vocab, args.users))
                    await asyncio.sleep(2 * ARRIVAL_SECONDS)
                for seed in range(args.seed, args.seed + 3 * args.gates, 3):
                    await pair.gate(seed)
                    if other.poll() is not None or child.poll() is not None:
                        raise RuntimeError("an engine has ended; see its log")
            finally:
                await pair.scraper.close()
                turns = [crowd.end() for crowd in crowds]
                if turns and args.serving:
                    record.facts["latencies"] = pair.latencies(turns[0])


def main() -> int:
    """Run the gates. Return 1 if none ended."""
    args = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # On SIGTERM, the servers end, too.
    record = Record(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvpilot-model-") as scratch:
        model = args.model or random_model(args, Path(scratch, "model"))
        try:
            asyncio.run(measured(args, record, model, args.out.parent))
            record.facts["error"] = None
        except TimeoutError:
            record.facts["error"] = f"{record.verdicts.total()} of {args.gates} gates ended in {args.limit:.0f} s"
        except (ProbeError, RuntimeError, OSError) as failure:
            record.facts["error"] = f"{type(failure).__name__}: {failure}"
        finally:
            record.write()
    say(f"{args.out.stem}: {record.facts['verdicts']}, {record.facts['error'] or 'all gates ended'}")
    return 0 if record.verdicts else 1


def random_model(args: argparse.Namespace, folder: Path) -> Path:
    """Write a model with the shape of `--shape`, a tokenizer and a chat template, and return its folder."""
    shape = SHAPES[args.shape]
    model = write(folder, shape, shape.layers, args.max_model_len)
    tokenizer(model, shape.vocab)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


if __name__ == "__main__":
    sys.exit(main())
