"""Measure which failure modes the accuracy gate finds: `python -m benchmarks.gate.run [ROW ...]`.

A 16-bit engine answers the packs of prompts once, as the baseline. Then each failure mode of `modes.py` damages a real
engine. The gate judges this engine as the operator judges a canary, by the stages that the mode names. Each mode is a
row of docs/benchmarks/gate.json. Without arguments, the program runs the rows that the file lacks.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks.gate import engines
from benchmarks.gate.modes import CONNECTOR, DEFAULT, DRAFTS, HEALTHY, HOST, IMAGES, MODES, PRESSURE, SHARED, Mode
from kvpilot_cli.validate import command as validate
from kvpilot_operator.api.rollout import Accuracy, Canary
from kvpilot_operator.api.words import Verdict
from kvpilot_operator.decide import Judgement, allowed, control_fault, described, judge
from kvpilot_operator.observe.scrape import Scraper
from kvpilot_operator.state.snapshot import ServiceKey
from kvpilot_probes import codec, loaded, packs, pressure, run
from kvpilot_probes.codec import Baseline
from kvpilot_probes.errors import ProbeError
from kvpilot_probes.loaded import Connector
from kvpilot_probes.pressure import Filled, Pool
from kvpilot_probes.session import Settings
from kvpilot_probes.stats import Measurement, summarise
from kvpilot_smallmodels.models import seeing_smollm2

OUT = Path("docs/benchmarks/gate.json")
KEPT = Path.home() / ".cache" / "kvpilot" / "gate"
LIMITS = Accuracy()
SETS = {DEFAULT: LIMITS.probe_sets, "paths": ("builtin/paths",)}
OWN_SETS = {**SETS, "images": ("builtin/images",)}
# The operator's settings for a canary, but with a longer deadline, because two busy cores are slow.
SETTINGS = Settings(budget_seconds=Canary().progress_deadline_seconds / 2, deadline_seconds=3600)
# The operator gives the pressure stage 180 s. Two busy cores take many times longer than a GPU to fill the KV cache.
PRESSURE_SECONDS = 240.0
# A larger pool than usual: it evicts no prompt, so only the stage CONNECTOR loads any.
OFFLOAD = ("--kv-offloading-size=1", "--num-gpu-blocks-override=340")
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'


def captured(url: str, name: str, dtype: str = "auto") -> Baseline:
    """Return the baseline of a stage: the answers of the engine at `url` to its prompts, and a control run."""

    async def both() -> Baseline:
        kept = await run.capture(url, "m", packs.load(OWN_SETS[name]), identity=name, dtype=dtype, settings=SETTINGS)
        noise = await run.control(url, "m", kept, settings=SETTINGS)
        return codec.with_control(kept, noise, datetime.now(UTC))

    return asyncio.run(both())


def judged(url: str, kept: Mapping[str, Baseline], stages: Sequence[str]) -> list[dict[str, Any]]:
    """Judge the canary at `url` by `stages`, until one of them finds damage. Return an entry for each stage.

    `kept` has the baselines by stage.
    """
    rows: list[dict[str, Any]] = []
    found: Measurement | None = None
    for name in stages:
        if rows and rows[-1]["verdict"] != Verdict.PASSED:
            break
        baseline = kept[DEFAULT if name in (PRESSURE, CONNECTOR) else name]
        known = described(baseline)
        limits = allowed(known, LIMITS)
        began = time.monotonic()
        try:
            if name == PRESSURE:
                more = asyncio.run(_fill(url, baseline, limits))
                before = found or summarise((), planned=[prompt.bucket for prompt in baseline.prompts])
                both = replace(before, seen=(*before.seen, *more.seen), planned=(*before.planned, PRESSURE))
                row = _row(name, judge(both, known, LIMITS), both)
                rows.append({**row, "prompts": len(more.seen), "seconds": round(more.milliseconds / 1000)})
            elif name == CONNECTOR and found is not None:
                both = asyncio.run(_load(url, baseline, found, limits))
                row, took = _row(name, judge(both, known, LIMITS), both), both.milliseconds - found.milliseconds
                rows.append({**row, "prompts": len(both.seen) - len(found.seen), "seconds": round(took / 1000)})
            else:
                found = asyncio.run(run.measure(url, "m", baseline, allowed=limits, settings=SETTINGS))
                rows.append(_row(name, judge(found, known, LIMITS), found))
        except ProbeError as error:
            rows.append(_error(name, type(error).__name__, str(error), began))
    return rows


async def _load(url: str, baseline: Baseline, found: Measurement, limits: Any) -> Measurement:
    scraper = Scraper(None)
    connector = Connector("OffloadingConnector", partial(scraper.loaded, ServiceKey("default", "gate"), url))
    try:
        return await loaded.extended(url, "m", baseline, found, connector, allowed=limits, settings=SETTINGS)
    finally:
        await scraper.close()


async def _fill(url: str, baseline: Baseline, limits: Any) -> Filled:
    vars(pressure)["PRESSURE_SECONDS"] = PRESSURE_SECONDS
    scraper = Scraper(None)

    async def look() -> Pool:
        page = await scraper.scrape(ServiceKey("default", "gate"), url, lambda _: None)
        return Pool(page.capacity_tokens, page.usage)

    try:
        return await pressure.fill(url, "m", baseline, look=look, allowed=limits, settings=SETTINGS)
    finally:
        await scraper.close()


def _row(name: str, judged: Judgement, found: Measurement) -> dict[str, Any]:
    return {
        "stage": name,
        "verdict": str(judged.verdict),
        "reason": judged.reason,
        "message": judged.message,
        "covered": judged.covered,
        "prompts": found.prompts,
        "seconds": round(found.milliseconds / 1000),
        "mean_kl_millinats": round(found.mean_kl_micronats / 1000, 2),
        "buckets": {bucket: [round(1000 * one.kl, 2) for one in found.seen if one.bucket == bucket]
                    for bucket in found.planned},
    }  # fmt: skip


def _error(name: str, reason: str, message: str, began: float) -> dict[str, Any]:
    said = {"verdict": "Error", "reason": reason, "message": message}
    return {"stage": name, **said, "prompts": 0, "seconds": round(time.monotonic() - began)}


class Matrix:
    """Rows of the detection matrix, in a JSON file that is written after each row."""

    def __init__(self, out: Path, only: list[str]) -> None:
        self._out, self._only = out, only
        self.rows: dict[str, Any] = json.loads(out.read_text())["rows"] if out.exists() else {}

    def wants(self, name: str) -> bool:
        """Return True if this run must measure the row. If the command line names no row, measure the missing ones."""
        return name in self._only if self._only else name not in self.rows

    def turn(self, mode: Mode) -> int:
        """Return the position of a mode's row on the command line, so that rows run in this order."""
        return self._only.index(mode.name) if self._only else 0

    def add(self, name: str, stages: list[dict[str, Any]], about: Mapping[str, Any] | None = None) -> None:
        """Store the results of a row in the JSON file, and print them. `about` has facts of the whole row."""
        self.rows[name] = {"date": datetime.now(UTC).date().isoformat(), **(about or {}), "stages": stages}
        facts = {"model": "SmolLM2-135M", "vllm": version("vllm"), "context": engines.CONTEXT}
        text = json.dumps({**facts, "pool": engines.POOL_TOKENS, "rows": self.rows}, indent=1)
        text = re.sub(r"\[([\d.,\s]+)\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)  # one line a list
        self._out.write_text(text + "\n")
        last = stages[-1]
        print(name, *(f"{s['stage']}: {s['verdict']} {s['prompts']} prompts {s['seconds']} s" for s in stages),
              last["message"], sep="\n  ", flush=True)  # fmt: skip


def main() -> None:
    """Run the rows that the command line names, or the missing ones."""
    KEPT.mkdir(parents=True, exist_ok=True)
    matrix = Matrix(OUT, sys.argv[1:])
    with TemporaryDirectory() as folder:
        kept = _baselines(Path(folder))
        _shared(matrix, kept, Path(folder))
        for mode in MODES:
            if mode.engine != SHARED and matrix.wants(mode.name):
                matrix.add(mode.name, _own_engine(mode, kept, Path(folder)))
        _healthy(matrix, kept, Path(folder))


def _baselines(folder: Path) -> dict[str, Baseline]:
    missing = [name for name in SETS if not (KEPT / name).exists()]
    if missing:
        with engines.baseline(folder) as running:
            for name in missing:
                (KEPT / name).write_bytes(codec.encode(captured(running.url, name)))
    return {name: codec.decode((KEPT / name).read_bytes()) for name in SETS}


def _healthy(matrix: Matrix, kept: Mapping[str, Baseline], folder: Path) -> None:
    for name in HEALTHY:
        if not matrix.wants(name):
            continue
        dtype, _, also = name.partition(" with ")
        arguments = {DRAFTS: (f"--speculative-config={NGRAM}",), HOST: OFFLOAD}.get(also, ())
        stages = {HOST: (DEFAULT, CONNECTOR), IMAGES: (IMAGES,)}.get(also, (DEFAULT,))
        model = seeing_smollm2() if also == IMAGES else None
        about = {}
        if model is not None:
            with engines.canary("auto", folder, model=model) as running:
                engines.switch(running, folder, "")
                kept = {**kept, IMAGES: captured(running.url, IMAGES)}
                about = {"baseline": _described(kept[IMAGES])}
        with engines.canary(dtype, folder, *arguments, model=model) as running:
            engines.switch(running, folder, "")
            matrix.add(name, judged(running.url, kept, stages), about)


def _described(kept: Baseline) -> dict[str, Any]:
    """Return the figures of the control, and the tokens of each prompt and of its answer."""
    return {
        "left_out": kept.left_out,
        "control": msgspec.to_builtins(kept.control),
        "prompt_tokens": [len(prompt.tokens) for prompt in kept.prompts],
        "answer_tokens": [len(prompt.answer) for prompt in kept.prompts],
    }


def _shared(matrix: Matrix, kept: Mapping[str, Baseline], folder: Path) -> None:
    left = [mode for mode in MODES if mode.engine == SHARED]
    left = sorted((mode for mode in left if matrix.wants(mode.name)), key=matrix.turn)
    while left:
        with engines.canary("auto", folder) as running:
            while left and running.healthy():
                mode = left.pop(0)
                engines.switch(running, folder, mode.name)
                matrix.add(mode.name, judged(running.url, kept, mode.stages))


def _own_engine(mode: Mode, kept: Mapping[str, Baseline], folder: Path) -> list[dict[str, Any]]:
    """Judge a mode that needs an engine with other arguments, or a damaged baseline, or that makes its engine exit."""
    if mode.engine == "spec":
        return [_refused(folder)]
    if mode.engine == "reference":
        began = time.monotonic()
        with engines.canary("auto", folder) as running:
            engines.switch(running, folder, "loops")
            try:
                kept = {name: captured(running.url, name) for name in mode.stages}
            except ProbeError as error:
                return [_error(mode.stages[0], type(error).__name__, str(error), began)]
            if (fault := control_fault(described(kept[DEFAULT]), LIMITS)) is not None:
                return [_error(DEFAULT, *fault, began)]
        with engines.canary("auto", folder) as running:
            engines.switch(running, folder, "")
            return judged(running.url, kept, mode.stages)
    if mode.engine == "pictures":
        with engines.canary("auto", folder, model=seeing_smollm2()) as running:
            engines.switch(running, folder, "")
            kept = {name: captured(running.url, name) for name in mode.stages}
            engines.switch(running, folder, mode.name)
            return judged(running.url, kept, mode.stages)
    dtype, arguments, model = {
        "drafts": ("auto", (f"--speculative-config={NGRAM}",), None),
        "offload": ("auto", OFFLOAD, None),
        "full-context": ("auto", (), None),
        "tokenizer": ("auto", (), engines.with_other_tokenizer(folder)),
    }[mode.engine]
    began = time.monotonic()
    try:
        with engines.canary(dtype, folder, *arguments, model=model) as running:
            engines.switch(running, folder, mode.name)
            return judged(running.url, kept, mode.stages)
    except RuntimeError as error:
        return [_error("start", "Refused", str(error)[-600:], began)]


def _refused(folder: Path) -> dict[str, Any]:
    """Let `kvpilot validate` check a service whose baseline has a float16 cache. Return the entry of the stage."""
    spec = {"model": {"source": "file:///m"}, "engine": {"image": "i"}, "kvCache": {"baseline": "float16"}}
    service = {"apiVersion": "kvpilot.io/v1alpha1", "kind": "QuantizedLLMService", "metadata": {"name": "m"}}
    (folder / "service.json").write_text(json.dumps({**service, "spec": spec}))
    with redirect_stdout(StringIO()) as said:
        code = validate.main(["-f", str(folder / "service.json")])
    verdict, reason = ("Error", "Refused") if code else ("Passed", "WithinLimits")
    return {
        "stage": "spec", "verdict": verdict, "reason": reason, "message": said.getvalue().splitlines()[1].strip(),
        "prompts": 0, "seconds": 0,
    }  # fmt: skip


if __name__ == "__main__":
    main()
