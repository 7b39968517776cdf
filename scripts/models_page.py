"""Write docs/models.md from docs/models.json: the facts of published models, and their size in our dtypes.

.venv/bin/python scripts/models_page.py docs/models.json docs/models.md
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from kvpilot_formats import formats, latent
from kvpilot_formats.models import Architecture, Kind, read, unsupported, unsupported_latent

DTYPES = ("auto", "fp8", *formats.own_names())
HEAD = """# Models

Made by `make generate` of [models.json](models.json), which holds the fields that matter of {count} published
configurations, each with its source. Figures are what `kvpilot-serve` and `kvpilot plan` read of them
([decision 21](decisions/0021-read-configs-over-a-table-of-class-defaults.md)). Tests hold layers, heads and head_dim
against transformers' own config classes, and those of {built} against the KV-cache specs that vLLM {vllm} builds
without weights. It builds the text part of models with images or sound. A config class that only the model's
repository has is replaced by one of transformers with the same fields. `kvpilot plan` takes those by name that
`kvpilot plan --list` shows, and every other one by the folder with its config.json.

- **layers**: *full* attend to everything; *window* and *chunked* hold at most so many tokens; *state* keep one of fixed
  size (Mamba, linear attention, convolutions) and may attend beside it; *shared* read another layer's cache.
- **bytes a token**, by dtype: in the full layers, of all KV heads; a latent (MLA) cache is the same on every GPU.
  Windows come on top, in 16 bits, and chunks, in the dtype; they do not grow with a sequence, nor do states.
- **our dtypes**: what keeps them from the model on a GPU; it is served in `auto` and in vLLM's own dtypes all the same.
  Models with latents have dtypes of their own, `mla8` and `mla4`, with the bytes of a token.
  *yes* is that `kvpilot-serve` starts the engine; what was run is below.
- **vLLM**: *same* where its specs are these, or why they were not built.
"""


def main() -> None:
    """Write the page."""
    corpus = json.loads(Path(sys.argv[1]).read_text())
    models = corpus["models"]
    built = sum("vllm" not in entry for entry in models)
    parts = [HEAD.format(count=len(models), built=built, vllm=corpus["vllm"]), *runs(corpus["runs"])]
    for family, entries in itertools.groupby(models, key=lambda entry: entry["family"]):
        parts += section(family, list(entries))
    Path(sys.argv[2]).write_text("\n".join(parts).rstrip() + "\n")


def runs(found: list[dict[str, str]]) -> list[str]:
    """Return the models that ran, and where."""
    rows = [f"| {run['models']} | {run['where']} | {run['what']} |" for run in found]
    return ["## What was run", "", "| models | where | what |", "|---|---|---|", *rows, ""]


def section(family: str, entries: list[dict[str, Any]]) -> list[str]:
    """Return the section of a family."""
    head = ["model", "layers", "heads", *(f"`{dtype}`" for dtype in DTYPES), "our dtypes", "vLLM"]
    rows = [row(entry) for entry in entries]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return [f"## {family}", "", *lines, ""]


def row(entry: dict[str, Any]) -> list[str]:
    """Return the line of a model."""
    facts = read(entry["config"])
    refusal = unsupported(facts)
    sizes = [size(facts, dtype, refusal) for dtype in DTYPES]
    verdict = f"no: {refusal}" if refusal else "yes"
    if facts.latent:
        verdict += of_latents(facts)
    return [entry["model"], layers(facts), heads(facts), *sizes, verdict, entry.get("vllm", "same")]


def of_latents(facts: Architecture) -> str:
    """Return the result of the latent dtypes for a model, as the end of a sentence."""
    if (what := unsupported_latent(facts)) is not None:
        return f", and {what}"
    return "; of their own " + " and ".join(
        f"`{name}` ({facts.token_bytes(latent.parse(name)):,})" for name in latent.names()
    )


def size(facts: Architecture, dtype: str, refusal: str | None) -> str:
    """Return the bytes of a token, if this dtype can serve the model."""
    if facts.other_layers or (formats.parse(dtype).ours and refusal is not None):
        return "-"
    if facts.index_bytes and dtype != "auto":
        return "-"  # vLLM's sparse attention has a layout of its own for fp8
    return f"{facts.token_bytes(dtype):,}"


def layers(facts: Architecture) -> str:
    """Return the layers by kind, for example: 5 full, 29 window (1,024)."""
    found = [
        f"{group.layers} {group.kind}" + (f" ({group.window:,})" if group.window else "") for group in facts.groups
    ]
    counts = (("state", facts.state_layers), ("shared", facts.shared_layers), ("unknown", facts.other_layers))
    return ", ".join([*found, *(f"{count} {name}" for name, count in counts if count)])


def heads(facts: Architecture) -> str:
    """Return query heads, KV heads and head_dim of each group, for example: 8 / 4 x 256."""
    if facts.latent:
        return f"{facts.heads} / latent {facts.latent}" + (f" + {facts.index_bytes} B" if facts.index_bytes else "")
    shapes = dict.fromkeys(
        f"{group.kv_heads} x {group.head_dim}" + (f", {group.value_dim}" if group.value_dim != group.head_dim else "")
        for group in sorted(facts.groups, key=lambda group: group.kind is not Kind.FULL)
    )
    return f"{facts.heads} / {'; '.join(shapes)}" if shapes else "-"


if __name__ == "__main__":
    main()
