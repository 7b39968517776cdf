"""Write a page for each JSON file of accuracy.py, beside the file.

python -m benchmarks.accuracy.accuracy_report FIGURES.json...
"""

from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy import page_beside
from benchmarks.accuracy.accuracy_rows import AGAINST_EXACT, OTHER_WINDOWS, SERVED, bits

SMOLLM2 = "smollm2-135m"

HEAD = """\
# Accuracy of KV-cache codecs{title}

This page shows how much each way to store a KV cache (a codec) changes a model's predictions. {headline}

```sh
python -m benchmarks.accuracy.accuracy{option} --out docs/benchmarks/{page}.json             # needles: --needle
python -m benchmarks.accuracy.accuracy_report docs/benchmarks/{page}.json
```

The first command uses a GPU if there is one.

Model: {model}

Each row compares a codec with a 16-bit (bf16) KV cache of the same model. The codec has encoded and decoded **every**
key (after RoPE) and value that attention reads. This includes the query's own token, as in decode steps.

Text: each row has {tokens} tokens, in sequences of 1,024, 2,048 and 4,608 tokens. The texts are Newton's *Opticks* (in
the sources of apache-tvm-ffi), the manual of GNU coreutils (Debian), Python's language reference (`pydoc_data`) and
source code of Python's standard library.

{rows}
The control compares two runs of the model in bf16, with different attention kernels. It shows the noise of 16 bits.

* *Bits*: mean bits of one number of a key or value, for heads of 128 elements (most models) and of {head_dim} (this
  model). They include scales, zero points, the recent window's pages and tokens kept in 16 bits, spread over a context
  of 4,096 tokens. Rivals with one scale for each vector need more bits for short vectors.
* *KL*: KL divergence of the next token's distribution in millinats (thousandths of a nat): mean with standard error,
  and 99th percentile.
* *Top-1*: share of positions at which the most likely token is the same.
* *PPL*: change of perplexity.
"""


@dataclass(frozen=True)
class Model:
    """Description of a model for its page.

    Attributes:
        title: end of the page's title.
        headline: main result, as a sentence.
        page: file name of the page.
        option: the benchmark's option that selects the model.
        about: text about the model.
        rows: text about how the rows were computed.
        head_dim: the model's head dimension.
    """

    title: str
    headline: str
    page: str
    option: str
    about: str
    rows: str
    head_dim: int


MODELS = {
    SMOLLM2: Model(
        title="",
        headline="""**As served,
`k4v4` changes SmolLM2-135M's predictions less than fp8 does: a mean KL divergence of 3.7 against 12.9.**""",
        page="accuracy",
        option="",
        about="""\
SmolLM2-135M-Instruct with its real weights (30 layers, 3 KV heads, head_dim 64), computed in float32. The test
uses a small model, because few bits in the KV cache damage small models most. Two pages have related measurements:
[Gemma 3](accuracy-gemma3.md), which has normalized queries and keys, and [a real vLLM](engine-kl.md), which decodes the
same texts from its pages.""",
        rows="""\
The parts of a row's name after the codec mean:

* `+self`: with calibration factors that an engine computes at start, from 8,192 tokens of built-in text.
* `+wN`: each query reads its last N tokens at 8 bits. These runs read exactly N tokens. Engines, and today's program,
  read [whole blocks](../recent-window.md), and so up to 64 tokens more. The bits are those of whole blocks.
* `+first128`: the first 128 tokens stay in 16 bits. Compare this row with KVarN's rows `+exact`, which keep the first
  128 tokens and the open tile in 16 bits.
""",
        head_dim=64,
    ),
    "gemma3-270m": Model(
        title=": Gemma 3 270M",
        headline="""**As
served, `k4v4` changes Gemma 3's predictions less than fp8 does: a mean KL divergence of 1.3 against 3.3.**""",
        page="accuracy-gemma3",
        option=" --model gemma3-270m",
        about="""\
Gemma 3 270M (pretrained) with its real weights, computed in float32. The weights have 4 to 6 bits, and are read
as bf16. The model has 18 layers, 1 KV head, head_dim 256, and normalized queries and keys. The codecs apply only to its
3 layers with full attention. The KV cache of the 15 layers with a window of 512 tokens stays in 16 bits, which is also
the engine's default. [The other page](accuracy.md) measures SmolLM2.""",
        rows="""\
Rows `+self` use calibration factors that an engine computes at start, from 8,192 tokens of built-in text. In rows
`+wN` each query reads its last N tokens at 8 bits. These runs read exactly N tokens. Engines, and today's program,
read [whole blocks](../recent-window.md), and so up to 64 tokens more. The bits are those of whole blocks.
""",
        head_dim=256,
    ),
}  # fmt: skip
"""Models by the name of their folder."""

SERVED_HEAD = """
## As served

The first rows are our dtypes with their
[default recent window](../recent-window.md). `k4v2` with a window of 64
follows, if it was measured. The last rows, from the control on, are for comparison.
{missing}
"""
ALONE_HEAD = "\n## Codecs alone, and rivals\n\n"

NEEDLE = """
## Needles

A text of {lengths} tokens hides five facts, at 10% to 90% of its length. The end of the prompt asks for
them. Each length was tested {seeds} times, with other numbers and another order of the questions. A fact counts as
found if each of its five digits is the model's first choice. The log-probability is that of the whole number, in nats.

| codec | {depths} | found | log-prob {columns} |
|---|{dashes}---|{column_dashes}
"""


def markdown(data: dict[str, Any]) -> str:
    """Return the page about one model's accuracy as Markdown."""
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
            title=model.title, headline=model.headline, option=model.option, page=model.page, model=model.about,
            rows=model.rows,
            tokens=f"{min(row['tokens'] for row in texts.values()):,}", head_dim=model.head_dim,
        ),
        SERVED_HEAD.format(missing=f"Not measured: {missing}.\n" if missing else ""),
        *_table([*served, *(name for name in beside if name in texts)], texts, model.head_dim),
        ALONE_HEAD,
        *_table(alone, texts, model.head_dim),
    ]  # fmt: skip
    parts += _by_position([name for name in names if name in {*served, *beside, "k4v4", "k4v2"}], texts)
    if "needle" in data:
        parts += _needle(data["needle"])
    return "".join(parts)


def _table(names: list[str], texts: dict[str, Any], head_dim: int) -> list[str]:
    out = [f"| codec | bits, head of 128 | of {head_dim} | mean KL | p99 KL | top-1 | PPL |\n" + "|---" * 7 + "|\n"]
    for name in names:
        row = texts[name]
        size = "16 | 16" if name == "control" else f"{bits(name, 128):.3f} | {bits(name, head_dim):.3f}"
        out.append(
            f"| {_label(name)} | {size} | "
            f"{row['mean_kl']:.1f} ± {row['standard_error']:.1f} | {row['p99_kl']:.0f} | "
            f"{row['top1']:.1f}% | {row['perplexity_change']:+.1f}% |\n"
        )
    return out


def _label(name: str) -> str:
    return "bf16 against bf16 (control)" if name == "control" else f"`{name}`"


def _figure(value: float | None) -> str:
    """Return a figure of a row as text, or "-" if it is missing because the run of the row was stopped early."""
    return "-" if value is None else f"{value:.1f}"


def _by_position(names: list[str], texts: dict[str, Any]) -> list[str]:
    columns = sorted(texts["control"]["buckets"], key=lambda column: int(column.split("-")[0]))
    out = [
        f"\n## Mean KL by position in the context\n\n| codec | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
    ]
    for name in ["control", *names]:
        figures = texts[name]["buckets"]
        out.append(f"| {_label(name)} | " + " | ".join(_figure(figures.get(c)) for c in columns) + " |\n")
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
