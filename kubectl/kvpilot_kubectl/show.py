"""Print text with the library rich: coloured and folded on a terminal, otherwise plain lines of any length."""

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

from kvpilot_kubectl import service
from kvpilot_kubectl.fields import Json, ago, at, duration, items, moment, stamp, text, whole, words
from kvpilot_operator.api.words import Action, ConditionType, Outcome

_GOOD, _BAD, _DIM, _BOLD = "green", "bold red", "dim", "bold"
_UNBOUNDED = 100_000
# Narrowest output in columns. The columns before a message take up to 70 of them.
_NARROWEST = 100
_TRAILING = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$", re.MULTILINE)
_NONE = "-"
_WARNINGS = (Action.ROLL_BACK, Action.HOLD)
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


def listed(services: Sequence[Json], *, everywhere: bool) -> RenderableType:
    """Return a table with a line for each service, and the conditions that need attention."""
    table = _table(["NAMESPACE", *_COLUMNS] if everywhere else _COLUMNS, right=("REPLICAS", "KV%"))
    for one in services:
        ready, serving = (service.condition(one, kind) for kind in (ConditionType.READY, ConditionType.SERVING))
        canary = service.canary(one)
        cells: list[str | Text] = [
            Text(text(one, "metadata", "name"), _BOLD),
            *(_word(word) if word is not None else _NONE for word in (ready, serving)),
            text(ready, "reason") if ready is not None else _NONE,
            service.dtype(one) or _NONE,
            text(one, "status", "stable", "revision") or _NONE,
            replicas(one),
            _number(whole(one, "status", "kvCache", "usagePercent")),
            service.load(one) or _NONE,
            trial(canary) if canary is not None else _NONE,
            mode(one),
            _attention(one),
        ]
        table.add_row(*([text(one, "metadata", "namespace"), *cells] if everywhere else cells))
    return table


def detailed(obj: Json, now: datetime) -> list[RenderableType]:
    """Return everything about one service."""
    facts, status, canary = _table(()), at(obj, "status"), service.canary(obj)
    accuracy = _accuracy(at(status, "accuracy", "last"))
    rows = [
        ("dtype", _joined(service.dtype(obj) or _NONE, _wanted(obj))),
        ("revision", text(status, "stable", "revision") or _NONE),
        ("address", text(status, "url") or _NONE),
        *([("adapters", ", ".join(adapters))] if (adapters := words(status, "adapters")) else []),
        ("replicas", f"{replicas(obj)} answer"),
        ("KV cache", _cache(obj)),
        ("load", service.load(obj) or _NONE),
        *([("accuracy", accuracy)] if accuracy else []),
        ("mode", mode(obj)),
        ("canary", f"{trial(canary)}: {text(canary, 'message')}" if canary is not None else "none"),
    ]
    for name, value in rows:
        facts.add_row(Text(name, _DIM), value)
    for one in service.standing(obj, now):
        until, reason = stamp(moment(one, "until")), text(one, "reason")
        facts.add_row(Text("denied", _DIM), f"{text(one, 'dtype')} until {until} ({reason}): {text(one, 'message')}")
    shown: list[RenderableType] = [Text(service.name(obj), _BOLD), facts]
    if note := unread(obj):
        shown.append(Text(note, _BAD))
    if conditions := list(items(status, "conditions")):
        table = _table(("CONDITION", "STATUS", "REASON", "FOR", "MESSAGE"))
        for one in conditions:
            since = moment(one, "lastTransitionTime")
            age = duration(now - since) if since is not None else _NONE
            table.add_row(text(one, "type"), _word(one), text(one, "reason"), age, text(one, "message"))
        shown += ["", table]
    return shown


def timeline(obj: Json, now: datetime) -> list[RenderableType]:
    """Return the decisions in the status, oldest first, with their figures. Trials and denials follow."""
    head = f"{service.name(obj)}: {service.dtype(obj) or 'nothing'} serves"
    shown: list[RenderableType] = [Text(head, _BOLD)]
    if note := unread(obj):
        shown.append(Text(note, _BAD))
    # The status has the newest decision first.
    decisions = [*items(obj, "status", "decisions")][::-1]
    for one in decisions:
        time, action = moment(one, "time"), text(one, "action")
        before, after = text(one, "fromDtype"), text(one, "toDtype")
        line = Text(stamp(time) or "(no time)", _DIM)
        line.append(f"  {ago(time, now):<12}", _DIM)
        line.append(f"  {action or '(no action)'}", _BAD if action in _WARNINGS else _BOLD)
        for part in (f"{before} -> {after}".strip() if before != after else before, text(one, "reason")):
            line.append(f"  {part}" if part else "")
        shown += ["", line, Padding(Text(text(one, "message")), (0, 0, 0, 4))]
        if steps := [*items(one, "options")]:
            shown.append(Padding(_weighed(steps, text(one, "message")), (0, 0, 0, 4)))
    if not decisions:
        shown += ["", "no decision has been recorded yet"]
    trials = (("trial", service.canary(obj)), ("last trial", service.last_trial(obj)))
    closing = [f"{which}: {_figures(one)}" for which, one in trials if one is not None]
    for one in service.standing(obj, now):
        until, why = moment(one, "until"), f"{text(one, 'reason')}: {text(one, 'message')}"
        closing.append(f"denied: {text(one, 'dtype')} until {stamp(until)} ({ago(until, now)}), {why}")
    return [*shown, *([""] if closing else []), *map(Text, closing)]


def replicas(obj: Json) -> str:
    """Return the numbers of ready and of wanted replicas, such as 2/3."""
    ready, wanted = (whole(obj, "status", field) for field in ("readyReplicas", "replicas"))
    return f"{_number(ready, '0' if wanted is not None else _NONE)}/{_number(wanted)}"


def mode(obj: Json) -> str:
    """Return the mode, and "paused" if spec.rollout.paused is set."""
    return _joined(text(obj, "spec", "kvCache", "mode") or _NONE, "paused" if service.is_paused(obj) else "")


def trial(canary: Json) -> str:
    """Return a canary's dtype, stage and share of the traffic, such as "k4v4 Shifting 10%"."""
    weight = whole(canary, "weightPercent")
    share = f" {weight}%" if weight is not None else ""
    return f"{text(canary, 'dtype') or _NONE} {service.stage(canary) or 'Unknown'}{share}"


def unread(obj: Json) -> str:
    """Return a warning if the status is missing or describes an older spec, else the empty string."""
    if not service.is_written(obj):
        return "no operator has written a status yet: check that one runs and watches this namespace (docs/install.md)"
    if service.is_behind(obj):
        return "the operator has not acted on the newest spec yet: this status is about an older one"
    return ""


def _weighed(steps: Sequence[Json], decision: str) -> Table:
    """Return a table of the steps that a decision compared. `decision` is its message."""
    table = _table(
        ("STEP", "DTYPE", "REPLICAS", "TOKENS", "OUTCOME", "WHY"),
        right=("REPLICAS", "TOKENS"),
    )
    for one in steps:
        outcome, message = text(one, "outcome"), text(one, "message")
        table.add_row(
            text(one, "action"),
            text(one, "dtype"),
            _number(whole(one, "replicas")),
            _number(whole(one, "capacityTokens")),
            Text(outcome, _GOOD if outcome == Outcome.CHOSEN else ""),
            "as above" if message and message in decision else message,
        )
    return table


def _figures(one: Json) -> str:
    dtypes = (text(one, "fromDtype") or _NONE, text(one, "dtype") or _NONE)
    # Show equal dtypes once: the trial then changes another part of the spec, which the message names.
    parts = [_joined(f"{' -> '.join(dict.fromkeys(dtypes))} {service.stage(one)}".strip(), text(one, "verdict"))]
    ours, theirs = whole(one, "capacityTokens"), whole(one, "stableCapacityTokens")
    if percent := whole(one, "capacityPercent"):
        ours, theirs = percent, 100
    if ours and theirs:
        parts.append(f"a replica holds {ours / theirs:.2f}x the tokens")
    if (change := whole(one, "itlP95ChangePercent")) is not None:
        parts.append(f"ITL p95 {change:+}%")
    return "; ".join([*parts, *filter(None, [text(one, "message")])])


def _accuracy(last: Json) -> str:
    """Return the last probed dtype, its verdict, and the kinds of prompts that the probe covered."""
    head = " ".join(filter(None, (text(last, "dtype"), text(last, "verdict"))))
    return ": ".join(filter(None, (head, text(last, "covered"))))


def _attention(obj: Json) -> Text:
    if not service.is_written(obj):
        return Text("no status yet", _BAD)
    found = [
        f"{text(one, 'type')}={text(one, 'status')} ({text(one, 'reason')})"
        for one in items(obj, "status", "conditions")
        if not service.is_calm(one) and text(one, "type") != ConditionType.READY
    ]
    late = ["newest spec not read yet"] if service.is_behind(obj) else []
    return Text(", ".join([*late, *found]) or _NONE, _BAD if found else "")


def _wanted(obj: Json) -> str:
    recommended = text(obj, "status", "kvCache", "recommendedDtype")
    return f"{recommended} recommended" if recommended not in ("", service.dtype(obj)) else ""


def _cache(obj: Json) -> str:
    usage, capacity = (whole(obj, "status", "kvCache", field) for field in ("usagePercent", "capacityTokens"))
    if usage is None and capacity is None:
        return _NONE
    return f"{_NONE if usage is None else f'{usage}%'} of {_number(capacity)} tokens"


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _word(condition: Json) -> Text:
    return Text(text(condition, "status"), _GOOD if service.is_calm(condition) else _BAD)


def _number(value: int | None, unknown: str = _NONE) -> str:
    return unknown if value is None else f"{value:,}"


def _table(head: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return a table like kubectl's: without lines, and with two spaces between columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=bool(head), header_style=_BOLD, pad_edge=False)
    for name in head:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=name != head[-1])
    return table
