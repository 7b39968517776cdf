"""Write the page of hostile.py's results.

python -m benchmarks.operator.hostile_page docs/benchmarks/operator-hostile.json
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kvpilot_operator.budget import METRICS_STEP_LINES

_HEAD = """# Do hostile services delay the good ones?

This page shows that 50 hostile services do not delay 50 good services of the same operator much. **An edit of a good
service takes {edit:.2f} s beside them, and {alone:.2f} s without them.**

```sh
python -m benchmarks.operator.hostile --background {background_cores:g} --out docs/benchmarks/operator-hostile.json
python -m benchmarks.operator.hostile_page docs/benchmarks/operator-hostile.json
```

{date}. The real
API server and etcd (Kubernetes 1.20), the real operator and all engines share {cores} cores. The operator runs in a
control group ({limit}) of {limit_mib} MiB, and scrapes each engine every second.

There are eleven kinds of hostile services, with at least four services each. Hostile services have twice as many pods
as good services. The column *beside a load* is a control: no hostile service runs, but another process takes
{background_cores:g} cores.

"""
_BAR = """
**The target: with hostile services, the median delay of a good service is at most twice its delay alone**:

{verdicts}

The next table shows used cores by program. *others* are processes that do not belong to the benchmark. During the run
with hostile services they took {others:.2f} cores.

"""
_TAIL = """
These measures protect the good services:

* If the operator refuses an engine's metrics pages, it scrapes this engine only every 30 s (`observe/scrape.py`).
* The operator parses {step} lines of a page at a time. In between, other tasks run.
* The next reconcile goes to one of the namespaces with the fewest running reconciles.
* The operator reads a service's probe packs at most every 15 s.

The same hostile services also ran without this protection, on 2026-11-22 on idle cores. The operator then took 0.84
cores. An edit took 0.26 s (0.02 s alone), a canary 8.9 s (2.9 s alone) and a cycle of scrapes 1.4 s.

Raw: [{name}]({name}).
"""
_Row = tuple[str, Callable[[dict[str, Any]], str]]
_ROWS: tuple[_Row, ...] = (
    ("peak memory of the control group, MiB", lambda one: f"{one['most_mib'] or one['rss_mib']:.0f}"),
    (
        "scrapes of a good engine: least, median, and cycles in the run",
        lambda one: "{least:.0f}, {median:.0f} in ".format(**one["scrapes_of_a_good_pod"]) + str(one["cycles"]),
    ),
    ("seconds of a cycle", lambda one: f"{cycle(one):.1f}"),
    ("failed scrapes of good engines", lambda one: str(one["failed_scrapes_of_good_pods"])),
    (
        "edits of good services, and edits without a status",
        lambda one: "{count}, {missed}".format(**one["edit_to_status"]),
    ),
    (
        "seconds from an edit to the status, p50 and p95",
        lambda one: "{p50:.2f}, {p95:.2f}".format(**one["edit_to_status"]),
    ),
    (
        "promoted canaries of good services, and p50 of seconds for one",
        lambda one: "{count}, {p50:.1f}".format(**one["probe"]),
    ),
    (
        "`/healthz`, p50 and max, ms",
        lambda one: "{:.0f}, {:.0f}".format(*(1000 * one["healthz"][q] for q in ("p50", "max"))),
    ),
)
_BARS: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = (
    ("an edit", lambda one: float(one["edit_to_status"]["p50"])),
    ("a canary", lambda one: float(one["probe"]["p50"])),
    ("a cycle of scrapes", lambda one: cycle(one)),
)
_PHASES = {"quiet": "alone", "background": "beside a load", "hostile": "beside hostile services"}


def cycle(one: dict[str, Any]) -> float:
    """Return the mean seconds of a scrape cycle."""
    return float(one["seconds"] / one["cycles"])


def table(phases: dict[str, dict[str, Any]], rows: tuple[_Row, ...]) -> str:
    """Return a table of `rows` as Markdown, with a column for each phase."""
    lines = [("", *(_PHASES[name] for name in phases)), ("---",) * (len(phases) + 1)]
    lines += [(what, *(said(one) for one in phases.values())) for what, said in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def verdicts(phases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield sentences that compare good services' delays beside hostile ones with the delays in the other phases."""
    for what, waited in _BARS:
        before, after = waited(phases["quiet"]), waited(phases["hostile"])
        word = "within" if after <= 2 * before else "**over**"
        beside = f", {waited(phases['background']):.2g} s beside a load" if "background" in phases else ""
        ratio = f"The ratio {after / before:.1f} is {word} the target."
        yield f"* {what}: {after:.2g} s, {before:.2g} s alone{beside}. {ratio}"


def _cores(program: str, one: dict[str, Any]) -> str:
    return f"{one['cores'].get(program, 0):.2f}"


def page(result: dict[str, Any], name: str) -> str:
    """Return the page about hostile services as Markdown."""
    phases = {phase: result[phase] for phase in _PHASES if phase in result}
    programs = sorted({program for one in phases.values() for program in one["cores"]} - {"others"})
    cores = tuple((program, partial(_cores, program)) for program in (*programs, "others"))
    return (
        _HEAD.format(**result, edit=_BARS[0][1](phases["hostile"]), alone=_BARS[0][1](phases["quiet"]))
        + table(phases, _ROWS)
        + _BAR.format(verdicts="\n".join(verdicts(phases)), others=phases["hostile"]["cores"]["others"])
        + table(phases, cores)
        + _TAIL.format(name=name, step=METRICS_STEP_LINES)
    )


def main() -> None:
    """Write the page beside the JSON file."""
    path = Path(sys.argv[1])
    path.with_suffix(".md").write_text(page(json.loads(path.read_text()), path.name))


if __name__ == "__main__":
    main()
