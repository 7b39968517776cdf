"""Judge QuantizedLLMServices in files: `kvpilot validate -f FILE...`. No cluster is needed.

It applies the CRD's schema, all its CEL rules, and the operator's own checks. See docs/validate.md.
Exit codes: 0 all accepted, 1 some refused, 2 a wrong argument, an unreadable file, or nothing to judge.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from kvpilot_cli import manifests
from kvpilot_cli.manifests import Found, ManifestError
from kvpilot_cli.validate.rules import rule_faults, schema_faults
from kvpilot_cli.validate.schema import root_schema, unknown_fields
from kvpilot_formats.untrusted import lines
from kvpilot_operator.api.faults import faults
from kvpilot_operator.api.names import API_VERSION
from kvpilot_operator.api.pod_template import KINDS

NOT_JUDGED = (
    "not judged: whether named Secrets, claims, classes, routes and nodes exist; quotas, admission webhooks and "
    "policies; rules of Kubernetes for pods beyond the schema"
)


class Fault(NamedTuple):
    """One fault of a service. `judge` names the check that found it: schema, rule (CEL) or operator."""

    field: str
    message: str
    judge: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ManifestError(message.removeprefix("argument "))


def main(argv: Sequence[str] | None = None) -> int:
    """Print a verdict for each service, and return the exit code."""
    try:
        options = _parser().parse_args(argv)
        found, others = manifests.services([file for group in options.file for file in group])
        if not found:
            kinds = ", ".join(sorted({one.kind or "no kind" for one in others})) or "nothing"
            raise ManifestError(f"-f: no QuantizedLLMService to judge (found: {kinds}); name a file that holds one")
    except ManifestError as error:
        print(f"kvpilot validate: {lines(str(error))}", file=sys.stderr)
        return 2
    judged = [(one, judge(one.obj, options.allow_host_access)) for one in found]
    print(json.dumps(document(judged, others), indent=2) if options.output == "json" else text(judged, others))
    return 1 if any(wrong for _, wrong in judged) else 0


def judge(obj: Mapping[str, Any], allowed: Collection[str] = ()) -> tuple[Fault, ...]:
    """Return every fault of one service, at most one for each field; () if it is accepted."""
    seen: dict[str, Fault] = {}
    for fault in _all(obj, allowed):
        seen.setdefault(fault.field, fault)
    return tuple(seen.values())


def _all(obj: Mapping[str, Any], allowed: Collection[str]) -> Iterator[Fault]:
    if (version := obj.get("apiVersion")) != API_VERSION:
        yield Fault("apiVersion", f"is {version!r}: use {API_VERSION}", "schema")
    about = obj.get("metadata")
    if not isinstance(about, Mapping) or not isinstance(about.get("name"), str):
        yield Fault("metadata.name", "is missing: set name", "schema")
        obj = {**obj, "metadata": {"name": "unnamed"}}
    # The operator's checks come first, because `judge` keeps the first fault of a field: they name the remedy and hide
    # secrets.
    for field, message in faults(obj, allowed):
        yield Fault(field, message, "operator")
    for path, known in unknown_fields(obj.get("spec"), root_schema()["properties"]["spec"], "spec"):
        close = difflib.get_close_matches(path.rpartition(".")[2], known, n=1)
        hint = f"did you mean {close[0]}?" if close else "remove it"
        yield Fault(path, f"is not a field of the API: {hint}", "schema")
    wrong = schema_faults(obj)
    yield from (Fault(field, message, "schema") for field, message in wrong)
    if not wrong:
        yield from (Fault(field, message, "rule") for field, message in rule_faults(obj))


def text(judged: Sequence[tuple[Found, tuple[Fault, ...]]], others: Sequence[Found]) -> str:
    """Return the verdicts on all services as text for people."""
    shown = []
    for one, wrong in judged:
        shown.append(lines(f"{'refused' if wrong else 'accepted'}  {one.name} ({one.file})"))
        shown += [f"  {fault.field}: {lines(fault.message)}" for fault in wrong]
    bad = sum(1 for _, wrong in judged if wrong)
    beside = f"; objects of other kinds, not judged: {len(others)}" if others else ""
    return "\n".join([*shown, f"{len(judged) - bad} accepted, {bad} refused{beside}", NOT_JUDGED])


def document(judged: Sequence[tuple[Found, tuple[Fault, ...]]], others: Sequence[Found]) -> dict[str, Any]:
    """Return the verdicts as a JSON document with stable keys."""
    rows = [
        {"file": one.file, "name": one.name, "accepted": not wrong, "faults": [fault._asdict() for fault in wrong]}
        for one, wrong in judged
    ]
    return {"services": rows, "leftOut": len(others), "notJudged": NOT_JUDGED.removeprefix("not judged: ")}


def _parser() -> _Parser:
    parser = _Parser(prog="kvpilot validate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-f", "--file", nargs="+", action="append", required=True, metavar="FILE",
        help="YAML or JSON files; several documents and List objects are read; - is stdin",
    )  # fmt: skip
    parser.add_argument("-o", "--output", choices=["json"], help="print JSON instead of text")
    parser.add_argument(
        "--allow-host-access", action="append", choices=KINDS, default=[],
        help="access to nodes that your operator allows (may be repeated)",
    )  # fmt: skip
    return parser
