"""Write the page of engine_kl.py: `python -m benchmarks.accuracy.engine_kl_report docs/benchmarks/engine-kl.json`."""

import textwrap
from typing import Any

from benchmarks.accuracy import page_beside

HEAD = """\
# The damage of a KV cache, measured in the engine

[The accuracy table](accuracy.md) models an engine: plain transformers attend over the output of each codec. Here a
real vLLM answers, with SmolLM2-135M's real weights and the table's texts, one token at a time. So every position is a
decode step over pages and rings, as a user's tokens are.

* KL (nats x 1000) compares the distributions over the whole vocabulary with those of the same engine with the cache in
  the model's dtype. They are made from the engine's states after the last norm.
* `model` is the table's model for the same tokens.
* The control is the 16-bit engine again, with each text in one prefill: two kernels of attention. In bfloat16 the
  control is part of each row's KL.
* The H200's rows after a hit are older than
  [the first key's own mean](../decisions/0022-store-the-first-key-relative-to-its-own-mean.md), on both sides.
* `fp8_e4m3` is vLLM's own code. On a GPU it also rounds queries to e4m3, which the model does not. On a CPU it rounds
  more, for a reason that was not examined.

"""

TABLE = """\
| row | KL in the engine | KL by the model | engine / model | p99 KL | top-1 | by the model |
|---|---|---|---|---|---|---|
"""


HIT = """\
Each piece of text is {hit} tokens, which an earlier request left in the prefix cache, and the 64 measured tokens after
them. Tokens of a hit are in no ring, so they are read in the bits of their pages.
"""

SAID = "The engines' messages:\n\n"


def markdown(data: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    return HEAD + "\n".join(_section(name, section) for name, section in sorted(data.items()))


def _section(name: str, section: dict[str, Any]) -> str:
    found, rows = section["versions"], section["rows"]
    tokens = max(row["engine"]["tokens"] for row in rows.values())
    worst = max(row["unlike"] for row in rows.values())
    about = (
        f"{section['date']}, vLLM {found['vllm']}, torch {found['torch']}, Python {found['python']}; {tokens:,} "
        "positions. The engines' own\nlog-probabilities of the text, from logits in the model's dtype, are within "
        f"{worst} nats of those of the states.\n"
    )
    hit = HIT.format(hit=section["hit"]) if section["hit"] else ""
    said = "".join(
        textwrap.fill(f"* `{row}`: {'; '.join(found['said'])}", 118, subsequent_indent="  ", break_on_hyphens=False)
        + "\n"
        for row, found in rows.items()
        if found["said"]
    )
    table = "".join(_row(*item) for item in rows.items())
    commands = "\n\n".join(f"`{command}`" for command in section["commands"])
    return f"## {name}\n\n{commands}\n\n{about}{hit}\n{TABLE}{table}\n{said and SAID + said}"


def _row(name: str, row: dict[str, Any]) -> str:
    engine, model = row["engine"], row["model"]
    label = "16 bits, in one prefill (control)" if name == "control" else f"`{name}`"
    by_model = ratio = top = "-"
    if model:
        by_model = f"{model['mean_kl']:.2f} ± {model['standard_error']:.2f}"
        ratio, top = f"{engine['mean_kl'] / model['mean_kl']:.2f}", f"{model['top1']:.1f}%"
    return (
        f"| {label} | {engine['mean_kl']:.2f} ± {engine['standard_error']:.2f} | {by_model} | {ratio} | "
        f"{engine['p99_kl']:.0f} | {engine['top1']:.1f}% | {top} |\n"
    )


if __name__ == "__main__":
    page_beside.write(markdown)
