"""Run `kvpilot backtest`: simulate loads under each policy, and report the results as text and JSON."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvpilot_cli.backtest import recorded, report
from kvpilot_cli.backtest.compare import POLICIES, Row, Starter, run_all
from kvpilot_cli.backtest.costs import BacktestError, load_profile
from kvpilot_cli.backtest.loads import NAMES, Asked, synthetic
from kvpilot_cli.backtest.pilot import load_spec
from kvpilot_cli.backtest.service import Objective
from kvpilot_cli.plan.facts import PlanError


def main(
    argv: Sequence[str] | None = None,
    policies: Mapping[str, Starter] = POLICIES,
    tell: Callable[[Sequence[Row], Objective], str] = report.terminal,
) -> int:
    """Run the command and return its exit status: 2 for unusable input. `tell` returns the text to print."""
    arguments = _parser(policies).parse_args(argv)
    try:
        return _backtest(arguments, policies, tell)
    except (BacktestError, PlanError) as error:
        print(f"kvpilot backtest: {error}", file=sys.stderr)
        return 2


def _backtest(
    a: argparse.Namespace, policies: Mapping[str, Starter], tell: Callable[[Sequence[Row], Objective], str]
) -> int:
    _check(a)
    spec, profile = load_spec(a.service), load_profile(a.profile)
    objective = Objective(a.ttft, a.itl / 1000)
    loads, note = _loads(a)
    began = time.monotonic()
    jobs = [(load, name, policies[name], spec, profile, objective) for load in loads for name in a.policies]
    rows = run_all(jobs)
    print(tell(rows, objective))
    print(f"{len(rows)} runs in {time.monotonic() - began:.0f} s")
    for row in rows if a.journal else ():
        print("\n".join(row.journal))
    if note:
        print(note)
    if a.json:
        a.json.write_bytes(report.as_json(rows) + b"\n")
    return 0


def _check(a: argparse.Namespace) -> None:
    """Check options whose faults would otherwise appear only at the end of the run.

    Raises:
        BacktestError: an option has an unusable value.
    """
    for name, such in (("size", 1), ("ttft", 5), ("itl", 60)):
        value = getattr(a, name)
        if not 0 < value < math.inf:
            raise BacktestError(f"{name}: {value}; give a number above 0, such as {such}")
    if a.seed < 0:
        raise BacktestError(f"seed: {a.seed}; give a whole number from 0 on")
    if a.recorded is not None and a.days != 1:
        raise BacktestError(f"days: {a.days} has no effect with --recorded; leave out one of the two")
    if a.json is not None and not a.json.absolute().parent.is_dir():
        raise BacktestError(f"json: {a.json}: its folder does not exist; make it first")


def _loads(a: argparse.Namespace) -> tuple[Sequence[Asked], str]:
    """Return the loads, and a line that describes recorded requests (empty for other loads)."""
    if a.recorded is not None:
        load = recorded.read(a.recorded).scaled(a.size, a.seed)
        return [load], load.told()
    names = NAMES if a.trace == "all" else tuple(a.trace.split(","))
    return [synthetic(name, a.days, a.seed, a.size) for name in names], ""


def _parser(policies: Mapping[str, Starter]) -> argparse.ArgumentParser:
    def names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in policies:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown: use one or more of {', '.join(policies)}")
        return text.split(",")

    parser = argparse.ArgumentParser(
        prog="kvpilot backtest", description="Replay a load through the pilot and with a fixed number of replicas."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--trace", default="all", help=f"synthetic loads, separated by commas: {', '.join(NAMES)}, or all"
    )
    what.add_argument(
        "--recorded", type=Path, metavar="FILE", help=f"recorded requests: CSV with {', '.join(recorded.COLUMNS)}"
    )
    parser.add_argument("--service", type=Path, help="manifest of the QuantizedLLMService to simulate")
    parser.add_argument("--profile", type=Path, help="costs of your model and GPU (default: Llama-3-8B on an H200)")
    parser.add_argument(
        "--policies",
        type=names,
        default=[*policies],
        help=f"policies to run, separated by commas (default {','.join(policies)})",
    )
    parser.add_argument("--days", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--size", type=float, default=1.0, help="factor for the number of requests of a synthetic or recorded load"
    )
    parser.add_argument("--ttft", type=float, default=5.0, help="objective: largest time to the first token in s (5)")
    parser.add_argument(
        "--itl", type=float, default=60.0, help="objective: largest mean time between two tokens in ms (60)"
    )
    parser.add_argument("--journal", action="store_true", help="print every step of the pilot with its reason")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser
