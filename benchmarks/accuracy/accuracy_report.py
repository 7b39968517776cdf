"""Write the pages of accuracy.py beside its JSON files.

python -m benchmarks.accuracy.accuracy_report FIGURES.json...
"""

from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy import page_beside
from benchmarks.accuracy.accuracy_rows import AGAINST_EXACT, OTHER_WINDOWS, SERVED, bits

SMOLLM2 = "smollm2-135m"

HEAD = """\
# Accuracy of KV-cache codecs{title}

```sh
python -m benchmarks.accuracy.accuracy{option} --out docs/benchmarks/{page}.json             # needles: --needle
python -m benchmarks.accuracy.accuracy_report docs/benchmarks/{page}.json
```

It uses a GPU if there is one.

Model: {model}
The base is a 16-bit (bf16) cache. **Every** key (after RoPE) and value that attention sees has passed the codec, also
the query's own token, as in decode steps.

Text: {tokens} tokens a row, in sequences of 1,024, 2,048 and 4,608: Newton's *Opticks* (in the sources that
apache-tvm-ffi carries), the manual of GNU coreutils (Debian), Python's language reference (`pydoc_data`)
and source code of its standard library.

{rows}
The control compares the model in bf16 with itself, through two kernels of attention. It shows the noise of 16 bits.

Bits count codes, scales and zero points, at head_dim 128 (most models) and at {head_dim} (this model). They also count
what is kept beside the pages (a ring's whole pages of 64 tokens, tokens in 16 bits), spread over a context of 4,096
tokens. Rivals with a scale per vector take more bits where the vectors are short. KL is over the whole vocabulary, in
nats x 1000 (millinats), with its standard error. PPL is the change of perplexity.
"""


@dataclass(frozen=True)
class Model:
    """Description of a model for its page.

    Attributes:
        title: end of the page's title.
        page: file name of the page.
        option: the benchmark's option that selects the model.
        about: text about the model.
        rows: text about the way in which the rows were computed.
        head_dim: the model's head dimension.
    """

    title: str
    page: str
    option: str
    about: str
    rows: str
    head_dim: int


MODELS = {
    SMOLLM2: Model(
        title="",
        page="accuracy",
        option="",
        about="""\
SmolLM2-135M-Instruct, its real weights (30 layers, 3 KV heads, head_dim 64), computed in float32. Small models
are hurt most by a small cache, which is why this is the test. [A second model](accuracy-gemma3.md) has normalized
queries and keys; [the same in the engine](engine-kl.md) is what a real vLLM says of the same texts, decoded from its
pages.""",
        rows="""\
Rows `+self` have the factors that an engine gives itself at start, from 8,192 tokens of built-in text. Rows
`+calibrated` use `kvpilot calibrate` on 16,384 tokens of other documents (licences, docstrings, the manual of
findutils, other source code), three sequences of 4,096 and four of 1,024, in bf16 on a GPU. In rows `+wN` a query
reads its last N tokens at 8 bits, as the ring of the
[recent window](../decisions/0016-keep-the-recent-window-as-residuals-in-a-ring.md) keeps them. The row `+first128`
keeps the first 128 tokens in 16 bits, to compare with KVarN (`+exact`), which keeps them and the open tile. The row
`k4v4+calibrated` is older than
[the first key's own mean](../decisions/0022-store-the-first-key-relative-to-its-own-mean.md), which lowers it. Of the
other rows `+calibrated`, that of `k4v4` was computed on a CPU with a file from an H200. Those of 2 bits and their
needles were computed on an H100 on 2026-11-24, with a file from there.
""",
        head_dim=64,
    ),
    "gemma3-270m": Model(
        title=": Gemma 3 270M",
        page="accuracy-gemma3",
        option=" --model gemma3-270m",
        about="""\
Gemma 3 270M (pretrained), its real weights (of 4 to 6 bits, read as bf16; 18 layers, 1 KV head, head_dim 256,
normalized queries and keys), computed in float32. Of its layers 3 are full, and these are what the rows are about: the
15 with a window of 512 tokens stay in 16 bits, as they do in an engine by default. [SmolLM2](accuracy.md) is the first
model.""",
        rows="""\
Rows `+self` have the factors that an engine gives itself at start, from 8,192 tokens of built-in text. In rows `+wN` a
query reads its last N tokens at 8 bits, as the ring of the
[recent window](../decisions/0016-keep-the-recent-window-as-residuals-in-a-ring.md) keeps them.
""",
        head_dim=256,
    ),
}  # fmt: skip
"""Models by the name of their folder."""

SERVED_HEAD = """
## As served

Each dtype with its [default recent window](../decisions/0016-keep-the-recent-window-as-residuals-in-a-ring.md).
`+calibrated` has a file, fitted for a window of 64. After them comes `k4v2` with a window of 64.
{missing}
"""
ALONE_HEAD = "\n## Codecs alone, and rivals\n\n"

NEEDLE = """
## Needles

Five facts at 10% to 90% of a text of {lengths} tokens, asked for at its end, with {seeds} orders and
sets of numbers. Found: all five digits are the model's first choice. The log-probability is of the whole number, in
nats.

| codec | {depths} | found | log-prob {columns} |
|---|{dashes}---|{column_dashes}
"""


def markdown(data: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    texts: dict[str, Any] = data["texts"]
    name = data.get("model", {}).get("name", SMOLLM2)
    model = MODELS[name]
    names = sorted((n for n in texts if n != "control"), key=lambda n: (-bits(n, 128), texts[n]["mean_kl"]))
    served = [name for name in (*SERVED, *OTHER_WINDOWS) if name in texts]
    missing = ", ".join(f"`{name}`" for name in SERVED if name not in texts)
    beside = ["control", "fp8_e4m3", "kvarn_k4v4+exact", *AGAINST_EXACT]
    alone = ["control", *(name for name in names if name not in served)]
    parts = [
        HEAD.format(
            title=model.title, option=model.option, page=model.page, model=model.about, rows=model.rows,
            tokens=f"{min(row['tokens'] for row in texts.values()):,}", head_dim=model.head_dim,
        ),
        SERVED_HEAD.format(missing=f"Not measured: {missing}.\n" if missing else ""),
        *_table([*served, *(name for name in beside if name in texts)], texts, model.head_dim),
        ALONE_HEAD,
        *_table(alone, texts, model.head_dim),
    ]  # fmt: skip
    parts += _split("By position in the context (mean KL)", "buckets", texts, names)
    parts += _split("By text (mean KL)", "texts", texts, names)
    if "needle" in data:
        parts += _needle(data["needle"])
    return "".join(parts)


def _table(names: list[str], texts: dict[str, Any], head_dim: int) -> list[str]:
    out = [f"| codec | bits, D=128 | D={head_dim} | tokens | mean KL | p99 KL | top-1 | PPL |\n" + "|---" * 8 + "|\n"]
    for name in names:
        row = texts[name]
        size = "16 | 16" if name == "control" else f"{bits(name, 128):.3f} | {bits(name, head_dim):.3f}"
        out.append(
            f"| {_label(name)} | {size} | {row['tokens']:,} | "
            f"{row['mean_kl']:.1f} ± {row['standard_error']:.1f} | {row['p99_kl']:.0f} | "
            f"{row['top1']:.1f}% | {row['perplexity_change']:+.1f}% |\n"
        )
    return out


def _label(name: str) -> str:
    return "bf16 against bf16 (control)" if name == "control" else f"`{name}`"


def _figure(value: float | None) -> str:
    """Return a number of a row as text; "-" if it is missing, because the row's run was stopped early."""
    return "-" if value is None else f"{value:.1f}"


def _split(title: str, key: str, texts: dict[str, Any], names: list[str]) -> list[str]:
    columns = list(texts["control"][key])
    if key == "buckets":
        columns.sort(key=lambda column: int(column.split("-")[0]))
    out = [f"\n## {title}\n\n| codec | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"]
    for name in ["control", *names]:
        out.append(f"| {_label(name)} | " + " | ".join(_figure(texts[name][key].get(c)) for c in columns) + " |\n")
    return out


def _needle(rows: dict[str, Any]) -> list[str]:
    first = next(iter(rows.values()))
    lengths = list(first["log_prob"])
    depths = list(dict.fromkeys(place.split("@")[1] for place in first["found"]))
    head = NEEDLE.format(
        lengths=", ".join(f"{int(n):,}" for n in lengths),
        seeds=first["asked_each"],
        depths=" | ".join(depths),
        columns=" | ".join(f"@{n}" for n in lengths),
        dashes="---|" * len(depths),
        column_dashes="---|" * len(lengths),
    )
    out = [head]
    order = sorted(rows, key=lambda n: -16 if n == "bf16" else -bits(n, 128))
    each = first["asked_each"] * len(lengths)
    for name in order:
        row = rows[name]
        found = [sum(count for place, count in row["found"].items() if place.endswith(f"@{d}")) for d in depths]
        cells = [f"{n}/{each}" for n in found] + [f"{row['found_all']}/{row['asked_all']}"]
        cells += [f"{row['log_prob'][n]:.2f}" for n in lengths]
        out.append(f"| `{name}` | {' | '.join(cells)} |\n")
    return out


if __name__ == "__main__":
    page_beside.write(markdown)
