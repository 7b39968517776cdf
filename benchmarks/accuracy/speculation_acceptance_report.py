"""Write the page of speculation_acceptance.py: `speculation_acceptance_report.py FIGURES.json`."""

import math
import textwrap
from typing import Any

from benchmarks.accuracy import page_beside

PAGE = """# Acceptance of ngram's drafts

vLLM counts drafted and accepted tokens (`vllm:spec_decode_num_*_tokens`), with SmolLM2-135M's real weights in {dtype},
greedy. In each of {prompts} prompts a piece of a text of [the accuracy table](accuracy.md) begins a second time, so
that the model quotes it. Each answer has {tokens} tokens; at most {drafts} are drafted, after 2 to 4 that stood in the
text before. Our dtypes are as served: calibrated by the engine, with their default window.

An answer changes with the dtype, and so do its drafts. `like auto` counts tokens of the answers up to the first one
that differs from `auto`'s. After ± stands a standard error of independent drafts. Raw:
[speculation-acceptance.json](speculation-acceptance.json).

`{command}`, {date}, vLLM {vllm}, torch {torch}, Python {python}, {machine}.

| dtype | drafted | accepted | share | beside `auto`, points | {texts} | like auto |
|---|---|---|---|---|---|{lines}---|
{rows}
{note}"""


def _share(counted: dict[str, int]) -> float:
    return counted["accepted"] / counted["drafted"]


def _variance(counted: dict[str, int]) -> float:
    """Return the variance of the share of accepted drafts, if drafts are independent."""
    return _share(counted) * (1 - _share(counted)) / counted["drafted"]


def markdown(facts: dict[str, Any]) -> str:
    """Return the page as Markdown. The first row is the baseline."""
    first, lines, texts = facts["rows"][0], [], list(facts["rows"][0]["texts"])
    for row in facts["rows"]:
        by_text = " | ".join(f"{_share(row['texts'][name]):.1%}" for name in texts)
        error = math.sqrt(_variance(row) + _variance(first))
        beside = f"{100 * (_share(row) - _share(first)):+.1f} ± {100 * error:.1f}" if row is not first else "-"
        lines.append(
            f"| `{row['dtype']}` | {row['drafted']:,} | {row['accepted']:,} | {_share(row):.1%} | {beside} | {by_text} "
            f"| {row['like_auto']:.0%} |"
        )
    note = textwrap.fill(facts.get("note", ""), 118, break_on_hyphens=False)
    facts = {
        **facts,
        "note": f"{note}\n" if note else "",
        "rows": "\n".join(lines),
        "texts": " | ".join(texts),
        "lines": "---|" * len(texts),
    }
    return PAGE.format(**facts)


if __name__ == "__main__":
    page_beside.write(markdown)
