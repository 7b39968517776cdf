"""Compare the accuracy of two engines: `kvpilot probe --baseline URL --candidate URL`.

Both serve the same model through vLLM's OpenAI-compatible API. The candidate is judged as the operator judges a canary:
its answers are compared with the baseline's token by token, and differences between two runs of the baseline do not
count against it. See docs/accuracy-gate.md.

Exit codes: 0 passed, 1 regressed, 2 no measurement or a wrong argument, 3 inconclusive.
"""

import argparse
import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec

from kvpilot_cli.probe import report
from kvpilot_cli.probe.compare import Endpoint, compare
from kvpilot_formats.untrusted import KvpilotError, whole
from kvpilot_operator.api.rollout import Accuracy
from kvpilot_operator.api.spec import parse
from kvpilot_probes import packs, session
from kvpilot_probes.client import Progress
from kvpilot_probes.errors import ProbeError

PASSED, REGRESSED, NO_MEASUREMENT, INCONCLUSIVE = 0, 1, 2, 3
_CODES = {"Passed": PASSED, "Failed": REGRESSED, "Error": NO_MEASUREMENT, "Inconclusive": INCONCLUSIVE}
_SHOW_EVERY = 16


class GateError(KvpilotError):
    """Error for a wrong argument. The message names option, value and remedy."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise GateError(message.removeprefix("argument "))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the two endpoints, print the result, and return the exit code. The module's docstring has the codes."""
    try:
        return _judged(_parser().parse_args(argv))
    except (GateError, ProbeError) as error:
        print(f"kvpilot probe: {_in_options(str(error))}", file=sys.stderr)
    except BrokenPipeError:
        raise  # The reader has closed the pipe, which `kvpilot` handles for every command.
    except Exception:
        # Catch every error, because Python would exit with 1, the code for a candidate that regressed.
        traceback.print_exc()
    return NO_MEASUREMENT


def _judged(options: argparse.Namespace) -> int:
    baseline, candidate = (_endpoint(options, side) for side in ("baseline", "candidate"))
    prompts = _prompts(options)
    limits = msgspec.structs.replace(
        _default_limits(),
        max_excess_kl_millinats=options.max_excess_kl_millinats,
        min_top1_agreement_percent=options.min_top1_agreement_percent,
    )
    settings = session.Settings(
        tokens=options.tokens, concurrency=options.concurrency, deadline_seconds=options.deadline_seconds
    )
    try:
        found = asyncio.run(compare(baseline, candidate, prompts, limits, settings, _told))
    finally:
        if sys.stderr.isatty():
            print("\r", end="\033[K", file=sys.stderr, flush=True)
    urls = baseline.url, candidate.url
    print(json.dumps(report.document(found, limits, urls), indent=2) if options.json else report.text(found, urls))
    return _CODES[found.judgement.verdict]


def _parser() -> _Parser:
    accuracy = _default_limits()
    parser = _Parser(
        prog="kvpilot probe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    for side, what in (("baseline", "address of the 16-bit engine"), ("candidate", "address of the engine to judge")):
        add(f"--{side}", required=True, metavar="URL", help=f"{what}, such as http://host:8000")
        add(f"--{side}-model", metavar="NAME", help="served model name (default: the only one that the endpoint lists)")
        key = "environment variable that has the engine's bearer token"
        add(f"--{side}-key-variable", metavar="NAME", help=key)
    connector = "KV connector of the candidate, such as OffloadingConnector: also judge pages that it loads"
    add("--candidate-connector", default="", metavar="NAME", help=connector)
    sets = f"built-in probe pack, builtin/NAME; may be repeated (default {' '.join(accuracy.probe_sets)})"
    add("--probe-set", action="append", metavar="SET", help=sets)
    add(
        "--prompts",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="YAML file with your own probe pack; may be repeated",
    )
    answer = _between(session.MIN_TOKENS, session.MAX_TOKENS)
    for option, kind, default, what in (
        ("context-tokens", _between(0, 2**31 - 1), 0, "longest generated prompt in tokens; 0: the engine's context"),
        (
            "max-excess-kl-millinats",
            _WHOLE,
            accuracy.max_excess_kl_millinats,
            "allowed mean KL divergence beyond the noise, in thousandths of a nat",
        ),
        ("min-top1-agreement-percent", _PERCENT, accuracy.min_top1_agreement_percent, "least share of equal tokens"),
        ("tokens", answer, session.DEFAULT_TOKENS, "tokens of each answer"),
        ("concurrency", _between(1, 64), session.CONCURRENCY, "most requests in flight; fewer if prompts are long"),
    ):
        add(f"--{option}", type=kind, default=default, metavar="N", help=f"{what} (default {default})")
    passes = "time limit in seconds of each pass, and of prompts through a connector (default: by the number of tokens)"
    add("--deadline-seconds", type=_WHOLE, metavar="N", help=passes)
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _endpoint(options: argparse.Namespace, side: str) -> Endpoint:
    option, url = f"--{side}", str(getattr(options, side))
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise GateError(f"{option} {url!r}: {error}; give an address such as http://host:8000") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise GateError(f"{option} {url!r} is not the address of an engine; give one such as http://host:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        # Do not show the address, because it may contain a key.
        raise GateError(f"{option}: credentials or a query in the address; give the key by {option}-key-variable")
    variable = getattr(options, f"{side}_key_variable")
    key = os.environ.get(variable) if variable is not None else None
    if variable is not None and not key:
        raise GateError(f"{option}-key-variable {variable!r}: this environment variable is not set; set it to the key")
    base = url.rstrip("/").removesuffix("/v1")
    connector = getattr(options, f"{side}_connector", "")
    return Endpoint(option, base, getattr(options, f"{side}_model"), key, connector)


def _prompts(options: argparse.Namespace) -> tuple[packs.ProbePrompt, ...]:
    sets = options.probe_set or ([] if options.prompts else _default_limits().probe_sets)
    given: dict[str, dict[str, str]] = {}
    for path in options.prompts:
        try:
            given[str(path)] = {packs.CONFIG_MAP_KEY: path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise GateError(f"--prompts {str(path)!r} cannot be read ({error}); give a YAML file") from error
    names = [name for name in sets if not name.startswith("configmap/")]
    if len(names) < len(sets):
        raise GateError("--probe-set configmap/...: this command has no cluster; give the pack's file with --prompts")
    return packs.load([*names, *(f"configmap/{name}" for name in given)], given, options.context_tokens)


def _default_limits() -> Accuracy:
    least = {"metadata": {"name": "probe"}, "spec": {"model": {"source": "file:///m"}, "engine": {"image": "i"}}}
    return parse(least).accuracy


def _told(stage: str) -> Progress:
    """Return a function to call after each answer or token. It shows their number if standard error is a terminal."""
    if not sys.stderr.isatty():
        return lambda: None
    count = 0

    def answered() -> None:
        nonlocal count
        count += 1
        if count % _SHOW_EVERY == 0:
            print(f"\r{stage}: {count} answers and tokens", end="\033[K", file=sys.stderr, flush=True)

    print(f"\r{stage}: starts", end="\033[K", file=sys.stderr, flush=True)
    return answered


def _in_options(message: str) -> str:
    """Return a message of the operator with the command's options instead of the API's fields."""
    return message.replace("spec.accuracy.probeSets", "--probe-set").replace("configmap/", "")


def _between(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = whole(text, high)
        if value is None or value < low:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}: give a whole number from {low} to {high}")
        return value

    return number


_WHOLE, _PERCENT = _between(1, 2**31 - 1), _between(0, 100)
