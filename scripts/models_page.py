"""Write docs/models.md and its two tables of models and the dtypes that they take.

    .venv/bin/python scripts/models_page.py cli/kvpilot_cli/plan/published.json docs/models.md

The models come from published.json, which `kvpilot plan` also reads.
"""

import json
import sys
from pathlib import Path
from typing import Any

from kvpilot_formats import formats, latent
from kvpilot_formats.models import Architecture, Kind, read, unsupported, unsupported_latent

DTYPES = ("auto", "fp8", *formats.own_names())
COMMON = ("Llama 2", "Llama 3", "Llama 4", "Qwen2", "Qwen2.5", "Qwen3", "Qwen3-Next", "Qwen3.5", "gpt-oss", "Gemma 1",
          "Gemma 2", "Gemma 3", "Gemma 3n", "Gemma 4", "Mistral")  # fmt: skip
"""Families on the first page of tables. The second page has all others."""
HEAD = """# Find your model

After this page you know whether a published model takes our dtypes, and the bytes of a token in each dtype.

| tables | families |
|---|---|
| [common families](models-common.md) | {common} |
| [other families](models-others.md) | {others} |

For a model that is not listed:

```sh
kvpilot plan /models/my-model --gpu H100-80GB      # the folder with its config.json
kvpilot plan --list                                # its models and GPUs by name
```

## How do you read the tables?

* **layers**: *full* layers attend to all tokens. *Window* and *chunked* layers hold at most the given number of tokens.
  *State* layers keep a state of fixed size (Mamba, linear attention, convolutions) and may also attend. *Shared* layers
  read another layer's cache.
* **heads** has the query heads, the KV heads and head_dim, as "query heads / KV heads x head_dim".
* **Columns named by a dtype** have the bytes that a token takes in all full layers and KV heads. With MLA, every GPU
  holds the whole latent. Window layers (in 16 bits), chunked layers and states take memory that does not grow with a
  sequence, so these columns leave it out.
* **our dtypes**: *yes* means that `kvpilot-serve` starts the engine on a GPU with kvpilot's dtypes. Otherwise the cell
  has the reason, and the model can only use `auto` and vLLM's own dtypes. For models with MLA, the cell names `mla8`
  and `mla4`, with the bytes of a token.
* **vLLM**: *same* means that vLLM's own KV-cache specs agree with the row. Otherwise the cell says why vLLM built none.

## What was run?

| models | where | what |
|---|---|---|
{runs}

## Where do the figures come from?

[published.json](../cli/kvpilot_cli/plan/published.json) has the fields of {count} published configurations, each with
its source. `kvpilot plan` knows each of these models by its name. It computes the figures of the tables from these
fields, as `kvpilot-serve` does
([decision 21](decisions/0021-read-configs-over-a-table-of-class-defaults.md)). `make generate` writes these pages.

* Tests compare layers, heads and head_dim with transformers' own config classes.
* Tests compare {built} models with the KV-cache specs that vLLM {vllm} builds without weights. For models with images
  or sound, vLLM builds the text part.
* If only the model's repository has the config class, a class of transformers with the same fields replaces it.
"""
TABLE = """# {title} models

This page shows the layers, heads and bytes of a token of {which} models. [Models](models.md) explains the columns.

"""


def main() -> None:
    """Write the page and its two tables."""
    corpus = json.loads(Path(sys.argv[1]).read_text())
    page = Path(sys.argv[2])
    models = corpus["models"]
    families = dict.fromkeys(entry["family"] for entry in models)
    text = HEAD.format(
        count=len(models),
        built=sum("vllm" not in entry for entry in models),
        vllm=corpus["vllm"],
        runs="\n".join(f"| {run['models']} | {run['where']} | {run['what']} |" for run in corpus["runs"]),
        common=", ".join(family for family in families if family in COMMON),
        others=", ".join(family for family in families if family not in COMMON),
    )
    page.write_text(text)
    common = [entry for entry in models if entry["family"] in COMMON]
    others = [entry for entry in models if entry["family"] not in COMMON]
    page.with_name("models-common.md").write_text(TABLE.format(title="Common", which="common") + table(common))
    page.with_name("models-others.md").write_text(TABLE.format(title="Other", which="other") + table(others))


def table(entries: list[dict[str, Any]]) -> str:
    """Return the table of these models."""
    head = ["family", "model", "layers", "heads", *(f"`{dtype}`" for dtype in DTYPES), "our dtypes", "vLLM"]
    rows = (head, ["---"] * len(head), *(row(entry) for entry in entries))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def row(entry: dict[str, Any]) -> list[str]:
    """Return the row of one model."""
    facts = read(entry["config"])
    refusal = unsupported(facts)
    sizes = [size(facts, dtype, refusal) for dtype in DTYPES]
    verdict = f"no: {refusal}" if refusal else "yes"
    if facts.latent:
        verdict += of_latents(facts)
    return [entry["family"], entry["model"], layers(facts), heads(facts), *sizes, verdict, entry.get("vllm", "same")]


def of_latents(facts: Architecture) -> str:
    """Return the verdict on the dtypes for latents, as the end of a sentence."""
    if (what := unsupported_latent(facts)) is not None:
        return f", and {what}"
    return "; of their own " + " and ".join(
        f"`{name}` ({facts.token_bytes(latent.parse(name)):,})" for name in latent.names()
    )


def size(facts: Architecture, dtype: str, refusal: str | None) -> str:
    """Return the bytes of a token in this dtype, or "-" if the dtype cannot serve the model."""
    if facts.other_layers or (formats.parse(dtype).ours and refusal is not None):
        return "-"
    if facts.index_bytes and dtype != "auto":
        return "-"  # vLLM's sparse attention has a layout of its own for fp8
    return f"{facts.token_bytes(dtype):,}"


def layers(facts: Architecture) -> str:
    """Return the kinds of layers, such as: 5 full, 29 window (1,024)."""
    found = [
        f"{group.layers} {group.kind}" + (f" ({group.window:,})" if group.window else "") for group in facts.groups
    ]
    counts = (("state", facts.state_layers), ("shared", facts.shared_layers), ("unknown", facts.other_layers))
    return ", ".join([*found, *(f"{count} {name}" for name, count in counts if count)])


def heads(facts: Architecture) -> str:
    """Return query heads, KV heads and head_dim of each group, such as: 8 / 4 x 256."""
    if facts.latent:
        return f"{facts.heads} / latent {facts.latent}" + (f" + {facts.index_bytes} B" if facts.index_bytes else "")
    shapes = dict.fromkeys(
        f"{group.kv_heads} x {group.head_dim}" + (f", {group.value_dim}" if group.value_dim != group.head_dim else "")
        for group in sorted(facts.groups, key=lambda group: group.kind is not Kind.FULL)
    )
    return f"{facts.heads} / {'; '.join(shapes)}" if shapes else "-"


if __name__ == "__main__":
    main()
