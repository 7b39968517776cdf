"""Screen of the demo: the steps, a table of the service, Events, and a summary at the end."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvpilot_demo.load import Stats

_KEPT_NOTES = 14
_EVENT_WIDTH = 150
# Columns that change all the time. In plain mode, a line is printed only if another column has changed.
_RESTLESS = ("CACHE USED", "ANSWERED")
Row = list[tuple[str, str]]


@dataclass(slots=True)
class _Step:
    title: str
    began: float
    ended: float | None = None
    failed: bool = False


@dataclass(slots=True)
class Screen:
    """Live screen on a terminal, or with `plain` a sequence of printed lines."""

    plain: bool
    _console: Console = field(default_factory=lambda: Console(highlight=False))
    _began: float = field(default_factory=time.monotonic)
    _steps: list[_Step] = field(default_factory=list)
    _notes: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_NOTES))
    _progress: Progress | None = None
    _row: Row = field(default_factory=list)
    _waiting: str = ""

    @contextmanager
    def live(self) -> Iterator[None]:
        """Redraw the screen until the block ends."""
        if self.plain:
            yield
            return
        with Live(get_renderable=self._render, console=self._console, refresh_per_second=4):
            yield

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show that a step starts, and at its end how long it took."""
        step = _Step(title, time.monotonic())
        self._steps.append(step)
        if self.plain:
            self._line(f"== {title}")
        try:
            yield
        except BaseException:
            step.failed = True
            raise
        finally:
            step.ended, self._waiting = time.monotonic(), ""
            if self.plain:
                self._line(f"   {'failed' if step.failed else 'done'} in {step.ended - step.began:.1f} s: {title}")

    def note(self, text: str) -> None:
        """Print a line of text below the steps."""
        self._notes.append(f"[dim]{self._elapsed():>7}[/dim]  {escape(text)}")
        if self.plain:
            self._line(f"   {text}")

    def event(self, reason: str, message: str) -> None:
        """Print an Event in one line."""
        text = f"{reason}: {' '.join(message.split())}"
        self.note(text if len(text) <= _EVENT_WIDTH else f"{text[: _EVENT_WIDTH - 3]}...")

    def waits_for(self, what: str, state: str) -> None:
        """Show what the current step waits for, and the state of the service."""
        waiting = f"waits for {what} ({state})"
        if self.plain and waiting != self._waiting:
            self._line(f"   {waiting}")
        self._waiting = waiting

    def show(self, service: dict[str, Any] | None, load: Stats | None) -> None:
        """Update the table with the state of the service and the figures of the load."""
        row = service_row(service, load)
        if self.plain and row and _calm(row) != _calm(self._row):
            self._line("   " + " | ".join(f"{name} {value}" for name, value in row))
        self._row = row

    @contextmanager
    def progress(self) -> Iterator[Any]:
        """Yield a function that draws a progress bar from a label and a fraction of 0 to 1."""
        bars = Progress(
            TextColumn("  {task.description}"),
            BarColumn(40),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
        )
        tasks: dict[str, Any] = {}

        def report(label: str, fraction: float) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=1.0)
                if self.plain:
                    self._line(f"   {label} ...")
            bars.update(tasks[label], completed=min(fraction, 1.0))

        self._progress = bars
        try:
            yield report
        finally:
            self._progress = None

    def close(self, summary: list[tuple[str, str]]) -> None:
        """Print the summary, which remains after the live screen ends."""
        if self.plain:
            for title, text in summary:
                self._line(f"{title:>12}  {text}")
            return
        table = Table.grid(padding=(0, 2))
        for title, text in summary:
            table.add_row(f"[bold]{escape(title)}[/bold]", escape(text))
        self._console.print(Panel(table, title="What you saw", title_align="left", border_style="green"))

    def _line(self, text: str) -> None:
        self._console.print(Text(f"[{self._elapsed():>7}] {text}"), soft_wrap=True)

    def _elapsed(self) -> str:
        seconds = time.monotonic() - self._began
        return f"{int(seconds) // 60}:{seconds % 60:04.1f}"

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._story()]
        if self._progress is not None:
            parts.append(self._progress)
        if self._waiting:
            parts.append(Text(f"   {self._waiting}", style="yellow"))
        if self._row:
            parts.append(_table(self._row))
        parts.append(Panel(Text.from_markup("\n".join(self._notes) or " "), title="Events", title_align="left"))
        return Group(*parts)

    def _story(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        for step in self._steps:
            if step.failed:
                sign = "[red]x[/red]"
            elif step.ended is not None:
                sign = "[green]ok[/green]"
            else:
                sign = "[yellow]..[/yellow]"
            table.add_row(sign, step.title, f"[dim]{(step.ended or time.monotonic()) - step.began:.0f} s[/dim]")
        return table


def service_row(service: dict[str, Any] | None, load: Stats | None) -> Row:
    """Return the cells of the table's only row: the service's state, its canary and the figures of the load."""
    if service is None:
        return []
    status = service.get("status") or {}
    conditions = {one["type"]: one["status"] for one in status.get("conditions", [])}
    cache, canary = status.get("kvCache", {}), status.get("canary")
    row = [
        ("SERVICE", service["metadata"]["name"]),
        ("READY", conditions.get("Ready", "-")),
        ("KV CACHE", cache.get("activeDtype", "-")),
        ("HOLDS", f"{cache['capacityTokens']:,} tokens" if cache.get("capacityTokens") else "-"),
        ("CACHE USED", f"{cache['usagePercent']}%" if cache.get("usagePercent") is not None else "-"),
        ("TOO FULL", conditions.get("MemoryPressured", "-")),
        ("ON TRIAL", f"{canary['dtype']}: {canary['stage']}" if canary else "-"),
    ]
    if load is not None:
        row += [("ANSWERED", str(load.ok)), ("FAILED", str(load.failed))]
    return row


def _calm(row: Row) -> Row:
    return [(name, value) for name, value in row if name not in _RESTLESS]


def _table(row: Row) -> RenderableType:
    table = Table(expand=False)
    for name, _ in row:
        table.add_column(name)
    table.add_row(*(value for _, value in row))
    return table
