"""Write the page about speculation_acceptance.py: `speculation_acceptance_report.py FIGURES.json`."""

import math
import textwrap
from typing import Any

from benchmarks.accuracy import page_beside

PAGE = """# How many n-gram drafts does each dtype accept?

This page shows how many draft tokens vLLM accepts with each KV-cache dtype. More accepted drafts mean fewer decode
steps. vLLM counts drafted and accepted tokens (`vllm:spec_decode_num_*_tokens`).

* **Model.** SmolLM2-135M with its real weights in {dtype}, greedy. Our dtypes have their defaults: calibration by the
  engine, and their recent window.
* **Prompts.** Each of the {prompts} prompts has a piece of a text of [the accuracy table](accuracy.md), and then the
  beginning of the same piece. So the model quotes the rest of the piece.
* **Drafts.** An answer has {tokens} tokens. If its last 2 to 4 tokens occur earlier in the text, vLLM drafts at most
  {drafts} tokens that followed them there.

```sh
{command}
```

{date}, vLLM {vllm}, torch {torch}, Python {python}, {machine}.

Another dtype gives other answers, and so other drafts. *Like auto* is the share of the answers' tokens before the
first one that differs from the answer of `auto`. The number after ± is the standard error if drafts are independent.
The four columns before the last have the share accepted in each text. Raw:
[speculation-acceptance.json](speculation-acceptance.json).

| dtype | drafted | accepted | share accepted | points more than `auto` | {texts} | like auto |
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
        "note": f"\n{note}\n" if note else "",
        "rows": "\n".join(lines),
        "texts": " | ".join(texts),
        "lines": "---|" * len(texts),
    }
    return PAGE.format(**facts)


if __name__ == "__main__":
    page_beside.write(markdown)
