"""Screen of the demo: its steps, the service as `kubectl get` shows it, the load, and notes."""

from __future__ import annotations

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

_KEPT_NOTES = 14


@dataclass(slots=True)
class Facts:
    """Rows of the live table. None means unknown."""

    service: dict[str, Any] | None = None
    load: str | None = None


@dataclass(slots=True)
class _Step:
    title: str
    began: float
    ended: float | None = None
    failed: bool = False


@dataclass(slots=True)
class Screen:
    """A live screen on a terminal, or plain lines (`plain`)."""

    plain: bool
    facts: Facts = field(default_factory=Facts)
    _console: Console = field(default_factory=lambda: Console(highlight=False))
    _began: float = field(default_factory=time.monotonic)
    _steps: list[_Step] = field(default_factory=list)
    _notes: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_NOTES))
    _progress: Progress | None = None
    _last_row: str = ""

    @contextmanager
    def live(self) -> Iterator[None]:
        """Draw until the block ends."""
        if self.plain:
            yield
            return
        with Live(get_renderable=self._render, console=self._console, refresh_per_second=4):
            yield

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show a step and its time."""
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
            step.ended = time.monotonic()
            if self.plain:
                self._line(f"   {'failed' if step.failed else 'done'} in {step.ended - step.began:.1f} s: {title}")

    def note(self, text: str) -> None:
        """Print a note."""
        self._notes.append(f"[dim]{self._elapsed():>7}[/dim]  {escape(text)}")
        if self.plain:
            self._line(f"   {text}")

    def show(self, service: dict[str, Any] | None, load: str | None) -> None:
        """Update the live table."""
        self.facts = Facts(service, load)
        if self.plain:
            row = " | ".join(f"{name} {value}" for name, value in service_row(service))
            if row != self._last_row:
                self._last_row = row
                self._line(f"   {row}")

    @contextmanager
    def progress(self) -> Iterator[Any]:
        """Yield a function (label, fraction 0..1) that draws a progress bar."""
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

    def close(self, panels: list[tuple[str, str]]) -> None:
        """Print the closing panel, which stays on the screen."""
        for title, text in panels:
            if self.plain:
                self._line(f"-- {title}\n{text}")
            else:
                self._console.print(Panel(escape(text), title=title, title_align="left", border_style="green"))

    def _line(self, text: str) -> None:
        self._console.print(Text(f"[{self._elapsed():>7}] {text}"), soft_wrap=True)

    def _elapsed(self) -> str:
        seconds = time.monotonic() - self._began
        return f"{int(seconds) // 60}:{seconds % 60:04.1f}"

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._story()]
        if self._progress is not None:
            parts.append(self._progress)
        if self.facts.service is not None:
            parts.append(_service_table(self.facts))
        parts.append(Panel(Text.from_markup("\n".join(self._notes) or " "), title="what happened", title_align="left"))
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


def service_row(service: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the columns of `kubectl get qllm`, and a line about the canary."""
    if service is None:
        return []
    status = service.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions", [])}
    cache, canary = status.get("kvCache", {}), status.get("canary")
    row = [
        *((kind.upper(), conditions.get(kind, {}).get("status", "-")) for kind in ("Ready", "Serving")),
        ("DTYPE", cache.get("activeDtype", "-")),
        ("KV%", str(cache.get("usagePercent", "-"))),
        ("CAPACITY", f"{cache['capacityTokens']:,} tokens" if cache.get("capacityTokens") else "-"),
        ("PRESSURED", conditions.get("MemoryPressured", {}).get("status", "-")),
        ("REASON", conditions.get("Ready", {}).get("reason", "-")),
    ]
    if canary:
        row.append(("CANARY", f"{canary['dtype']} {canary['stage']}"))
    return row


def _service_table(facts: Facts) -> RenderableType:
    table = Table(title="kubectl get qllm", title_justify="left", expand=False)
    row = service_row(facts.service)
    for name, _ in row:
        table.add_column(name)
    table.add_row(*(value for _, value in row))
    return Group(table, Text(f"  load: {facts.load}")) if facts.load else table
