"""Write the pages about runs of `decode.py` in docs/benchmarks: `python -m benchmarks.kernels.decode_page`.

The pages are h200-decode.md, h200-decode-wide.md for heads of 512 elements, and h100-decode-heads.md for heads of 80
and 192.
"""

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
INTRODUCTION = """\
Each table measures attention of one layer over random pages. Its heading has the shape (query heads/KV heads/head_dim),
and the number of sequences x the context of each in tokens. *last 64 finer* means a recent window of 64 tokens. The
columns are times in microseconds and ratios:

* *decode*: our split-KV kernel alone.
* *merged*: with the merge of the splits, which other backends always include.
* *layer*: also with the store of the new token.
* *of copy*: the KV cache's bytes over the time of *decode*, relative to the rate of a device-to-device copy in the same
  run. Backends without a *decode* time use *merged*.
* *over bf16*: the speed of *merged*, relative to the first bf16 row.
"""


def page(source: Path, title: str) -> str:
    """Return a run's results as Markdown under this title."""
    facts = json.loads(source.read_text())
    copy = facts["copy_bytes_per_s"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    about = (
        f"`{facts['command']}`, {facts['date']}, {facts['gpu']}, {versions}. The copy rate of this run is "
        f"{copy / 1e12:.2f} TB/s. Raw: [{source.name}]({source.name})."
    )
    lines = [title, "", textwrap.fill(about, 118, break_on_hyphens=False, break_long_words=False)]
    last = None
    for row in facts["rows"]:
        case = row["case"]
        here = (
            f"{case['shape']} ({case['heads']}/{case['kv_heads']}/{case['dim']}), {case['batch']} x {case['context']:,}"
        )
        if here != last:
            last = here
            rows = [r for r in facts["rows"] if r["case"] == case]
            base = next((r["merged"] for r in rows if r["name"].endswith(" bf16") and "merged" in r), None)
            lines += [
                "",
                f"### {here}",
                "",
                "| | decode | merged | layer | of copy | over bf16 |",
                "|---|---|---|---|---|---|",
            ]
        if "error" in row:
            lines.append(f"| {row['name']} | {row['error'].splitlines()[0][:90]} | | | | |")
            continue
        alone = row.get("decode", row["merged"])
        cells = [f"{row[k]:.1f}" if k in row else "" for k in ("decode", "merged", "layer")]
        share = row["bytes"] / alone * 1e6 / copy
        ratio = f"{base / row['merged']:.2f}x" if base else ""
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {share:.2f} | {ratio} |")
    return "\n".join(lines) + "\n"


def write(name: str, title: str, runs: Iterable[tuple[str, str]]) -> None:
    """Write several runs as one page. `runs` has their file names and titles."""
    (DOCS / name).write_text(
        "\n".join([f"{title}\n\n{INTRODUCTION}", *(page(DOCS / source, heading) for source, heading in runs)])
    )


def main() -> None:
    """Write the pages."""
    matrices = "before [rows were rotated without matrices](h100-decode-short.md)"
    write(
        "h200-decode.md",
        "# Decode attention on one NVIDIA H200",
        (
            ("h200-decode-xqa.json", "## Beside FlashAttention 3 and XQA"),
            ("h200-decode-integers.json", "## Keys as 8-bit integers (stopped before the last shapes)"),
            ("h200-decode-integers-recent.json", "## Keys as 8-bit integers, with a window (stopped too)"),
        ),
    )
    write(
        "h200-decode-wide.md",
        "# Decode of heads of 512 elements",
        (
            ("h100-decode-wide.json", f"## On an H100, {matrices}"),
            ("h200-decode-wide.json", "## On an H200, an earlier version of the kernels"),
        ),
    )
    rounds = "## On an H100, before [work was cut for several rounds](h100-decode-rounds.md)"
    write("h100-decode-heads.md", "# Decode of heads of 80 and of 192 elements", (("h100-decode-heads.json", rounds),))


if __name__ == "__main__":
    main()
