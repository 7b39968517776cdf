"""Write the page about runs of gpu_equality.py: `gpu_equality_page.py RAW.json ... [--out docs/benchmarks]`.

RAW are files that gpu_equality.py has written. The program writes OUT/h200-equality.md, and OUT/h200-equality.json with
all runs.
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.engine.gpu_engine_report import versions_of

INTRODUCTION = """\
# Do other requests in the batch change an answer?

This page shows how much an engine's answers depend on the other requests that it serves. **On a model with random
weights, a full batch changes answers of `k4v4` by a KL divergence of 2.1 millinats, and of a 16-bit cache by 0.7.**

```sh
python -m benchmarks.accuracy.gpu_equality
```

Raw: [h200-equality.json](h200-equality.json). Engines answer the same prompts greedily, in different conditions:

* *alone*: one prompt at a time in one prefill, eager, without prefix caching;
* *crowded*: many prompts at once in small chunks, with CUDA graphs and prefix caching, and a KV cache so small that
  vLLM preempts requests;
* *tp2*: crowded, on several GPUs.

The rows of `auto` are the control. Its answers differ too, because 16-bit sums in another order change the result where
two tokens are almost equally likely.

By default, a chunk of a prompt attends to its own tokens in 16 bits, and to earlier tokens from quantized pages. So the
chunk size changes which tokens attention reads quantized, and with them the answers. Chunks that are "read back from
pages" attend to their own tokens in pages, too.

*Tokens equal* counts an answer's tokens up to its first difference. *Top-1* is the share of positions with the same
most likely token. Differences of log-probabilities and the KL divergence (thousandths of a nat) cover the 20 most
likely tokens, and also the first different position.
"""


def wrapped(text: str) -> str:
    """Wrap a paragraph at the line length of the documentation."""
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False)


def row(facts: dict[str, Any]) -> str:
    """Return the comparison of two runs as one row of the Markdown table."""
    names = f"| `{facts['run']}` | `{facts['against']}` "
    if facts.get("errors"):
        return names + "| " + "; ".join(f"{at}: {error}" for at, error in facts["errors"].items()) + " |" * 8
    pressure = "-"
    if not facts["run"].endswith("/alone"):
        pressure = f"{facts['vllm:num_preemptions']} / {facts['vllm:prefix_cache_hits']}"
    shares = [f"{facts['answers_equal']:.1%}", f"{facts['tokens_equal']:.1%}", f"{facts['top1_equal']:.2%}"]
    damage = [
        f"{facts['mean_logprob_difference']:.4f}",
        f"{1e3 * facts['mean_kl']:.2f}",
        f"{1e3 * facts['p99_kl']:.1f}",
    ]
    return f"{names}| {' | '.join([pressure, *shares, *damage])} | {facts['positions']:,} |"


def table(run: dict[str, Any]) -> str:
    """Return the page's section about one run of gpu_equality.py, with a table of its comparisons."""
    versions = versions_of(run["versions"]) if run["versions"] else "no run ended well"
    options = run["options"]
    heads = ["run", "against", "preemptions / cached tokens", "answers equal", "tokens equal", "top-1",
             "mean difference of logprobs, nats", "mean KL, millinats", "p99 of KL", "positions"]  # fmt: skip
    return "\n".join(
        [
            f"## {run['model']}\n",
            wrapped(
                f"{versions}; {run['date']} UTC. Each of {options['prompts']} prompts got {options['tokens']} tokens. "
                f"Crowded engines had a KV cache of {options['kv_tokens']:,} tokens in blocks of "
                f"{options['block_size']}, and chunks of {options['chunk']} tokens"
                f"{', which were read back from pages' if options['from_pages'] else ''}."
            )
            + "\n",
            f"| {' | '.join(heads)} |",
            "|---" * len(heads) + "|",
            *map(row, run["rows"]),
            "",
            *([wrapped(run["note"]), ""] if "note" in run else []),
        ]
    )


def main() -> int:
    """Write the page, and one JSON file with all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs" / "benchmarks")
    args = parser.parse_args()
    read = [json.loads(path.read_text()) for path in args.raw]
    runs = [run for document in read for run in (document if isinstance(document, list) else [document])]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "h200-equality.json").write_text(json.dumps(runs, indent=1) + "\n")
    (args.out / "h200-equality.md").write_text("\n".join([INTRODUCTION, *map(table, runs)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
