"""Print text by the library rich: coloured and folded on a terminal, otherwise plain lines of any length."""

import copy
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvpilot_kubectl.fields import ago, duration, stamp
from kvpilot_kubectl.journal import Entry
from kvpilot_kubectl.pods import Warned
from kvpilot_kubectl.service import Condition, Service, Trial
from kvpilot_operator.api.words import ConditionType, Outcome

_GOOD, _BAD, _DIM, _BOLD = "green", "bold red", "dim", "bold"
_UNBOUNDED = 100_000
# Narrowest output in columns. The columns before a message take up to 70 of them.
_NARROWEST = 100
_TRAILING = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$", re.MULTILINE)
_NONE = "-"
_COLUMNS = (
    "NAME", "READY", "SERVING", "REASON", "DTYPE", "REVISION", "REPLICAS", "KV%", "LOAD", "CANARY", "MODE", "ATTENTION",
)  # fmt: skip
# Keep rich from interpreting a status' text as markup.
_PLAIN: Final[dict[str, Any]] = {"markup": False, "emoji": False, "highlight": False}


def display(parts: Iterable[RenderableType], *, fold: bool = True) -> None:
    """Print to stdout, in colour on a terminal unless NO_COLOR is set."""
    sys.stdout.write(rendered(parts, Console(**_PLAIN), fold=fold))


def rendered(parts: Iterable[RenderableType], console: Console, *, fold: bool = True) -> str:
    """Return the text that `display` prints. Lines are folded only on a terminal, and only if `fold` is set."""
    width = max(console.width, _NARROWEST) if console.is_terminal and fold else _UNBOUNDED
    own = copy.copy(console) if console.is_terminal else Console(**_PLAIN, color_system=None, force_terminal=False)
    own.width = width
    with own.capture() as captured:
        for part in parts:
            own.print(part)
    return _TRAILING.sub(r"\1", captured.get())


def listed(services: Sequence[Service], *, everywhere: bool) -> RenderableType:
    """Return a table with a line for each service, and the conditions that need attention."""
    table = _table(["NAMESPACE", *_COLUMNS] if everywhere else _COLUMNS, right=("REPLICAS", "KV%"))
    for one in services:
        ready, serving = one.condition(ConditionType.READY), one.condition(ConditionType.SERVING)
        cells: list[str | Text] = [
            Text(one.name, _BOLD),
            *(_word(word) if word is not None else _NONE for word in (ready, serving)),
            ready.reason if ready is not None else _NONE,
            one.dtype or _NONE,
            one.revision or _NONE,
            replicas(one),
            _number(one.usage),
            one.load or _NONE,
            trial(one.canary) if one.canary is not None else _NONE,
            mode(one),
            _attention(one),
        ]
        table.add_row(*([one.namespace, *cells] if everywhere else cells))
    return table


def detailed(
    service: Service, now: datetime, stuck: Sequence[Warned] = (), notes: Sequence[str] = ()
) -> list[RenderableType]:
    """Return everything about one service, and the warnings about pods that do not answer."""
    facts = _table(())
    rows = [
        ("dtype", _joined(service.dtype or _NONE, _wanted(service))),
        ("revision", service.revision or _NONE),
        ("address", service.url or _NONE),
        *([("adapters", ", ".join(service.adapters))] if service.adapters else []),
        *([("weights", service.weights)] if service.weights else []),
        ("replicas", f"{replicas(service)} answer"),
        ("KV cache", _cache(service)),
        ("load", service.load or _NONE),
        *([("accuracy", service.accuracy)] if service.accuracy else []),
        ("mode", mode(service)),
        ("canary", f"{trial(service.canary)}: {service.canary.message}" if service.canary is not None else "none"),
    ]
    for name, value in rows:
        facts.add_row(Text(name, _DIM), value)
    for one in service.standing(now):
        facts.add_row(Text("denied", _DIM), f"{one.dtype} until {stamp(one.until)} ({one.reason}): {one.message}")
    shown: list[RenderableType] = [Text(f"{service.namespace}/{service.name}", _BOLD), facts]
    if note := unread(service):
        shown.append(Text(note, _BAD))
    if service.conditions:
        table = _table(("CONDITION", "STATUS", "REASON", "FOR", "MESSAGE"))
        for condition in service.conditions:
            age = duration(now - condition.since) if condition.since is not None else _NONE
            table.add_row(condition.type, _word(condition), condition.reason, age, condition.message)
        shown += ["", table]
    if stuck:
        table = _table(("POD", "NODE", "WARNING", "AGO", "MESSAGE"))
        for warned in stuck:
            age = duration(now - warned.time) if warned.time is not None else _NONE
            table.add_row(warned.pod, warned.node or _NONE, Text(warned.reason or _NONE, _BAD), age, warned.message)
        shown += ["", table]
    return [*shown, *([""] if notes else []), *map(Text, notes)]


def timeline(service: Service, entries: Sequence[Entry], now: datetime, notes: Sequence[str]) -> list[RenderableType]:
    """Return the journal, oldest first, with the figures of each decision. Trials, denials and notes follow."""
    head = f"{service.namespace}/{service.name}: {service.dtype or 'nothing'} serves"
    shown: list[RenderableType] = [Text(head, _BOLD)]
    if note := unread(service):
        shown.append(Text(note, _BAD))
    for entry in entries:
        line = Text(stamp(entry.time) or "(no time)", _DIM)
        line.append(f"  {ago(entry.time, now):<12}", _DIM)
        line.append(f"  {entry.action}", _BAD if entry.warning else _BOLD)
        for part in (entry.move, entry.reason, f"x{entry.count}" if entry.count > 1 else ""):
            line.append(f"  {part}" if part else "")
        shown += ["", line, Padding(Text(entry.message), (0, 0, 0, 4))]
        if entry.steps:
            shown.append(Padding(_weighed(entry), (0, 0, 0, 4)))
    if not entries:
        shown += ["", "no decision has been recorded yet"]
    closing = [
        f"{'trial' if one is service.canary else 'last trial'}: {_figures(one)}"
        for one in (service.canary, service.last_trial)
        if one is not None
    ]
    closing += [
        f"denied: {one.dtype} until {stamp(one.until)} ({ago(one.until, now)}), {one.reason}: {one.message}"
        for one in service.standing(now)
    ]
    closing += notes
    return [*shown, *([""] if closing else []), *map(Text, closing)]


def replicas(service: Service) -> str:
    """Return the numbers of ready and of wanted replicas, such as 2/3."""
    return f"{_number(service.ready, '0' if service.replicas is not None else _NONE)}/{_number(service.replicas)}"


def mode(service: Service) -> str:
    """Return the mode, and "paused" if spec.rollout.paused is set."""
    return _joined(service.mode or _NONE, "paused" if service.paused else "")


def trial(canary: Trial) -> str:
    """Return a canary's dtype, stage and share of the traffic, such as "k4v4 Shifting 10%"."""
    share = f" {canary.weight}%" if canary.weight is not None else ""
    return f"{canary.dtype or _NONE} {canary.stage or 'Unknown'}{share}"


def unread(service: Service) -> str:
    """Return a warning if the status is missing or describes an older spec, else the empty string."""
    if not service.written:
        return "no operator has written a status yet: check that one runs and watches this namespace (docs/install.md)"
    if service.behind:
        return "the operator has not acted on the newest spec yet: this status is about an older one"
    return ""


def _weighed(entry: Entry) -> Table:
    table = _table(
        ("STEP", "DTYPE", "REPLICAS", "TOKENS", "OUTCOME", "WHY"),
        right=("REPLICAS", "TOKENS"),
    )
    for one in entry.steps:
        table.add_row(
            one.action,
            one.dtype,
            _number(one.replicas),
            _number(one.capacity),
            Text(one.outcome, _GOOD if one.outcome == Outcome.CHOSEN else ""),
            "as above" if one.message and one.message in entry.message else one.message,
        )
    return table


def _figures(one: Trial) -> str:
    dtypes = (one.from_dtype or _NONE, one.dtype or _NONE)
    # Show equal dtypes once: the trial then changes another part of the spec, which the message names.
    parts = [_joined(f"{' -> '.join(dict.fromkeys(dtypes))} {one.stage}".strip(), one.verdict)]
    if one.stable_capacity and one.capacity:
        parts.append(f"a replica holds {one.capacity / one.stable_capacity:.2f}x the tokens")
    if one.itl_change is not None:
        parts.append(f"ITL p95 {one.itl_change:+}%")
    return f"{'; '.join(parts)}; {one.message}" if one.message else "; ".join(parts)


def _attention(service: Service) -> Text:
    if not service.written:
        return Text("no status yet", _BAD)
    found = [
        f"{one.type}={one.status} ({one.reason})"
        for one in service.conditions
        if not one.calm and one.type != ConditionType.READY
    ]
    return Text(
        ", ".join([*(["newest spec not read yet"] if service.behind else []), *found]) or _NONE, _BAD if found else ""
    )


def _wanted(service: Service) -> str:
    return f"{service.recommended} recommended" if service.recommended not in ("", service.dtype) else ""


def _cache(service: Service) -> str:
    if service.usage is None and service.capacity is None:
        return _NONE
    return f"{_percent(service.usage)} of {_number(service.capacity)} tokens"


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _word(condition: Condition) -> Text:
    return Text(condition.status, _GOOD if condition.calm else _BAD)


def _number(value: int | None, unknown: str = _NONE) -> str:
    return unknown if value is None else f"{value:,}"


def _percent(value: int | None) -> str:
    return _NONE if value is None else f"{value}%"


def _table(head: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return a table like kubectl's: without lines, and with two spaces between columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=bool(head), header_style=_BOLD, pad_edge=False)
    for name in head:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=name != head[-1])
    return table
