"""Write the page and the plot of a run of fleet.py.

    python -m benchmarks.operator.fleet_page docs/benchmarks/fleet.json

The program writes fleet.md and fleet.svg beside the JSON file.
"""

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "kvpilot"

_HEAD = """# What does the operator need for a fleet?

This page shows how fast the operator reacts with many services, and how much processor time and memory it needs.
**With {services:,} services and {pods:,} pods it uses {used:.2f} cores and {mib:.0f} MiB, and 99% of all edits are in
the status within {edit:.1f} s.**

```sh
python -m benchmarks.operator.fleet{options}
python -m benchmarks.operator.fleet_page docs/benchmarks/fleet.json
```

{date}. The benchmark runs the real operator with the real API server and etcd (Kubernetes 1.20,
`localcluster/kvpilot_localcluster`). Two more processes replace kubelets and engines:

- One creates the Deployments' pods. They are real objects, Running and Ready on 100 nodes, but nothing runs in them.
- The other answers `/metrics` for all pods, each on its own address. It serves a page of a real vLLM 0.32 (19 KiB),
  whose counters grow.

**All processes share {cores} cores**, so the operator also waits while the API server uses the cores.

Each service has mode `Recommend`, canary steps and three replicas. At each size, the benchmark edits two specs a second
and makes one pod a second unready. Every 30 s it reads the operator's own metrics. The columns are:

- *up*: time from the creation of the first new service until all new services have three ready replicas.
- *edit*: time from the API server's answer to an edit until the watch event of the status with the edit's generation.
- *pod*: time from the API server's answer to a change of a pod until the watch event of the status that counts it.
- *gap*: time between two scrapes of one pod, measured at the pods. The operator scrapes each pod every 5 s, or less
  often in large fleets, because it fetches at most {pages:.0f} pages a second.
- *requests/s*: the operator's requests to the API server, including watches.
- *own page*: size of the operator's own `/metrics` in KiB, and time of its slowest answer.
- *cores*: processor seconds that the operator uses per second.

"""

_COLUMNS = """| services | pods | up s | edit p50/p95/p99 ms | pod p50/p95/p99 ms | gap p50/p99 s | reconciles/s | requests/s | own page KiB, s | cores | RSS MiB |
|---|---|---|---|---|---|---|---|---|---|---|
"""  # noqa: E501


def row(one: dict[str, Any]) -> str:
    """Return the table line of one fleet size."""

    def ms(shares: dict[str, float]) -> str:
        return " / ".join(f"{1000 * shares[q]:.0f}" for q in ("p50", "p95", "p99"))

    gap = one["scrape_gap"]
    cells = (
        f"{one['services']}",
        f"{one['pods']}",
        f"{one['up_seconds']:.0f}",
        ms(one["edit_to_status"]),
        ms(one["pod_to_status"]),
        f"{gap['p50']:.1f} / {gap['p99']:.1f}",
        f"{one['passes_per_second']:.0f}",
        f"{one['api_requests_per_second']:.1f}",
        f"{one['own_page_kib']:.0f}, {one['own_page_seconds']['max']:.1f}",
        f"{one['cores']:.2f}",
        f"{one['rss_mib'][-1][1]:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def slope(memory: list[list[float]]) -> float:
    """Return the growth in MiB per hour, by least squares."""
    n = len(memory)
    t, m = sum(x for x, _ in memory) / n, sum(y for _, y in memory) / n
    return 3600 * sum((x - t) * (y - m) for x, y in memory) / sum((x - t) ** 2 for x, _ in memory)


def bars(result: dict[str, Any]) -> str:
    """Return the table of targets, with the figures at the largest size and over the long run."""
    every = [result["sizes"][-1], *([result["soak"]] if "soak" in result else [])]
    edge = max(one[what]["p99"] for one in every for what in ("edit_to_status", "pod_to_status"))
    cycle = max(one["scrape_cycle_seconds"] for one in every)
    cores = max(one["cores"] for one in every)
    memory = max(mib for one in every for _, mib in one["rss_mib"])
    lines = [
        ("from an edit or a pod's change to the status, p99", "under 2 s", f"{edge:.2f} s", edge < 2),
        ("scrape cycle", "under 15 s", f"{cycle:.1f} s", cycle < 15),
        ("operator's cores", "under 1", f"{cores:.2f}", cores < 1),
        ("operator's memory", "under 512 MiB", f"{memory:.0f} MiB", memory < 512),
    ]
    told = [f"| {what} | {bar} | {found} | {'pass' if passed else '**fail**'} |" for what, bar, found, passed in lines]
    return "\n".join(["", "| figure at the largest size | target | measured | |", "|---|---|---|---|", *told, ""])


def soak(one: dict[str, Any]) -> str:
    """Return the text about the soak: the long run at the largest size."""
    memory, edit = one["rss_mib"], one["edit_to_status"]
    half = memory[len(memory) // 2 :]
    told = (
        f"**The run continued for {one['seconds'] / 60:.0f} minutes at the largest size**, with as many edits a "
        f"second. The p99 of *edit* was {1000 * edit['p99']:.0f} ms (maximum {1000 * edit['max']:.0f} ms, "
        f"{edit['count']} edits). The operator used {one['cores']:.2f} cores. It had {one['scrapes_failed']:.0f} "
        f"failed scrapes and {one['passes_failed']:.0f} failed reconciles. Its RSS went from {memory[0][1]:.0f} to "
        f"{memory[-1][1]:.0f} MiB, and changed by {slope(half):+.0f} MiB an hour in the second half."
    )
    return f"\n{_wrapped(told)}\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False)


def plot(result: dict[str, Any], file: Path) -> None:
    """Plot latency, interval between scrapes, cores and memory over the number of services."""
    sizes = result["sizes"]
    x = [one["services"] for one in sizes]
    figure, axes = plt.subplots(2, 2, figsize=(9, 6))
    for name, label in (("edit_to_status", "edit"), ("pod_to_status", "pod")):
        axes[0][0].plot(x, [one[name]["p99"] for one in sizes], marker="o", label=f"{label}, p99")
    axes[0][0].axhline(2.0, color="gray", linestyle=":", label="bar")
    axes[0][0].set_title("from change to written status, s")
    axes[0][1].plot(x, [one["scrape_gap"]["p99"] for one in sizes], marker="o", label="between two scrapes, p99")
    axes[0][1].axhline(15.0, color="gray", linestyle=":", label="bar")
    axes[0][1].set_title("scrape cycle, s")
    axes[1][0].plot(x, [one["cores"] for one in sizes], marker="o", label="operator")
    axes[1][0].axhline(1.0, color="gray", linestyle=":", label="bar")
    axes[1][0].set_title("cores")
    axes[1][1].plot(x, [one["rss_mib"][-1][1] for one in sizes], marker="o", label="operator")
    axes[1][1].axhline(512, color="gray", linestyle=":", label="bar")
    axes[1][1].set_title("RSS, MiB")
    for axis in (axis for line in axes for axis in line):
        axis.set_xlabel("services (three pods each)")
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def table(result: dict[str, Any]) -> str:
    """Return the Markdown table of results, one line per fleet size."""
    return _COLUMNS + "\n".join(row(one) for one in result["sizes"]) + "\n"


def main() -> None:
    """Write the page and the plot of the results that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    source = parser.parse_args().source
    result = json.loads(source.read_text())
    options = f" --soak {result['soak']['seconds']:.0f}" if "soak" in result else ""
    last = result["sizes"][-1]
    text = _HEAD.format(
        date=result["date"], cores=result["cores"], pages=result["pages_per_second"], options=options,
        services=last["services"], pods=last["pods"], used=last["cores"], mib=last["rss_mib"][-1][1],
        edit=last["edit_to_status"]["p99"],
    )  # fmt: skip
    text += table(result) + bars(result)
    if "soak" in result:
        text += soak(result["soak"])
    if "note" in result:
        text += f"\n{_wrapped(result['note'])}\n"
    text += (
        f"\n![growth from {result['sizes'][0]['services']} to {result['sizes'][-1]['services']} services](fleet.svg)\n"
    )
    text += f"\nRaw: [{source.name}]({source.name}).\n"
    source.with_suffix(".md").write_text(text)
    plot(result, source.with_suffix(".svg"))


if __name__ == "__main__":
    main()
