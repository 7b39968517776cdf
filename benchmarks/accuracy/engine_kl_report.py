"""Write the page on engine_kl.py: `python -m benchmarks.accuracy.engine_kl_report docs/benchmarks/engine-kl.json`."""

from typing import Any

from benchmarks.accuracy import page_beside

HEAD = """\
# Damage of a KV cache in a real vLLM

This page shows that a real vLLM does the damage that the [accuracy table](accuracy.md) computes. The table only
simulates an engine: plain transformers attend over the output of each codec. **With `k8v4`, `k4v4` and `k4v2` in
float16 and float32, the engine's damage is 0.89 to 1.02 times the simulation's.**

vLLM serves SmolLM2-135M with its real weights, and gets the table's texts one token at a time. So every position is a
decode step over pages and recent windows, as for a user's tokens.

* *KL in the engine* (thousandths of a nat): KL divergence between an engine with the row's KV cache and one with an
  unquantized KV cache, over the whole vocabulary.
* *KL in the simulation*: KL divergence in the accuracy table's simulation, for the same tokens.
* *p99 KL*, *top-1*: 99th percentile of the KL in the engine, and share of positions with the same most likely token.
* The part of a row's name after `+w` is the recent window in tokens. `+wall`: the engine ran with `--recent-tokens=all`
  and enough free memory to read all tokens at 8 bits. `+self`: the engine calibrated itself at start.
* The control is the engine with the unquantized KV cache again, but with each text in one prefill. So it shows the
  effect of another attention kernel. In bfloat16 this effect is part of each row's KL.
* The engines of 2026-11-22 had recent windows in
  [rings](../decisions/0016-keep-the-recent-window-as-residuals-in-a-ring.md). So they read exactly the last tokens at 8
  bits, and not whole blocks. After a prefix hit, their windows were empty.
* The H200's rows after a prefix hit are from before kvpilot stored
  [the first key relative to its own mean](../decisions/0022-store-the-first-key-relative-to-its-own-mean.md). This
  holds for the engine's KL and for the simulation's.
* `fp8_e4m3` is vLLM's own code. On a GPU, vLLM also rounds queries to e4m3, which the simulation does not. On a CPU,
  vLLM rounds more than the simulation. The reason was not examined.

"""

TABLE = """\
| row | KL in the engine | KL in the simulation | engine / simulation | p99 KL | top-1 | top-1 in the simulation |
|---|---|---|---|---|---|---|
"""


HIT = """\

Each sequence begins with {hit} tokens that an earlier request left in the prefix cache. The 64 tokens after them are
measured.
"""


def markdown(data: dict[str, Any]) -> str:
    """Return the page about KL divergences in real engines as Markdown."""
    return HEAD + "\n".join(_section(name, section) for name, section in sorted(data.items()))


def _section(name: str, section: dict[str, Any]) -> str:
    found, rows = section["versions"], section["rows"]
    tokens = max(row["engine"]["tokens"] for row in rows.values())
    worst = max(row["unlike"] for row in rows.values())
    about = (
        f"{section['date']}, vLLM {found['vllm']}, torch {found['torch']}, Python {found['python']}; {tokens:,} "
        "positions. The distributions\nare computed from the engines' hidden states. The engines' own "
        f"log-probabilities differ from them by at most {worst} nats.\n"
    )
    hit = HIT.format(hit=section["hit"]) if section["hit"] else ""
    table = "".join(_row(*item) for item in rows.items())
    commands = "\n".join(section["commands"])
    return f"## {name}\n\n```sh\n{commands}\n```\n\n{about}{hit}\n{TABLE}{table}"


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
