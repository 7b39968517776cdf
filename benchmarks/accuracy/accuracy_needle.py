"""Needle task: a long text hides facts at several depths, and the end of the prompt asks for them.

A prompt is a text with five facts (needles), "The magic number of CITY is DDDDD.", at 0.1, 0.3, 0.5, 0.7 and 0.9 of its
length. The prompt ends with the same five sentences in another order. A needle counts as found if each digit of its
number is the model's most likely token, given the digits before it.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.accuracy.accuracy_model import Probe
from benchmarks.accuracy.accuracy_rows import Reading

LENGTHS = (1024, 4096, 8192)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
CITIES = ("Lisbon", "Oslo", "Vienna", "Dublin", "Prague")
SEEDS = (1, 2, 3, 4)
TEXT = [("opticks", len(SEEDS) * max(LENGTHS), 1)]
"""Text in which the needles are hidden: name, tokens, number of sequences. Each seed uses another section of it."""


def needles(
    probe: Probe, reading: Reading | None, text: torch.Tensor, lengths: Sequence[int] = LENGTHS
) -> dict[str, Any]:
    """Ask for every hidden fact (needle). Return how many were found, how many were hidden, and log-probabilities.

    Needles are counted by context length and depth. Each log-probability is a sum over the tokens of a
    fact's number, averaged over the facts of a context length.

    Args:
        text: tokens of the text that hides the needles (`TEXT`).
        lengths: context lengths to run, out of `LENGTHS`.
    """
    found: dict[str, int] = {f"{n}@{int(100 * d)}%": 0 for n in lengths for d in DEPTHS}
    logs: dict[int, list[float]] = {n: [] for n in lengths}
    for length in lengths:
        for seed in SEEDS:
            tokens, answers = _prompt(probe, text, length, seed)
            states = probe.hidden(tokens, reading)
            for depth, (start, end) in answers.items():
                ((_, logits),) = probe.logits(states[start - 1 : end - 1])
                row = logits.log_softmax(-1)
                digits = tokens[start:end]
                logs[length].append(float(row.gather(1, digits[:, None]).sum()))
                found[f"{length}@{int(100 * depth)}%"] += int(torch.equal(row.argmax(-1), digits))
    return {
        "found": found,
        "asked_each": len(SEEDS),
        "found_all": sum(found.values()),
        "asked_all": len(SEEDS) * len(found),
        "log_prob": {str(n): round(sum(x) / len(x), 3) for n, x in logs.items()},
    }


def _prompt(
    probe: Probe, text: torch.Tensor, length: int, seed: int
) -> tuple[torch.Tensor, dict[float, tuple[int, int]]]:
    """Return a prompt of about `length` token IDs, and the positions [begin, end) of the number at each depth.

    `seed` selects the section of the text, the numbers and the order of the questions.
    """
    rng = random.Random(seed)  # noqa: S311  # a reproducible test, not a secret
    cities = rng.sample(CITIES, len(CITIES))
    numbers = ["".join(rng.choice("0123456789") for _ in range(5)) for _ in cities]

    def ids(text: str) -> list[int]:
        return list(probe.tokenizer(text, add_special_tokens=False).input_ids)

    fact = [
        (ids(f"\n\nThe magic number of {c} is"), ids(f" {n}"), ids(".\n\n"))
        for c, n in zip(cities, numbers, strict=True)
    ]
    asked = list(range(len(fact)))
    rng.shuffle(asked)
    size = sum(map(len, fact[0]))
    begin = SEEDS.index(seed) * max(LENGTHS)
    body = text[begin : begin + length - 2 * size * len(fact)].tolist()
    out: list[int] = []
    at = 0
    for depth, parts in zip(DEPTHS, fact, strict=True):
        stop = int(depth * len(body))
        out += body[at:stop] + parts[0] + parts[1] + parts[2]
        at = stop
    out += body[at:]
    answers = {}
    for i in asked:
        out += fact[i][0]
        answers[DEPTHS[i]] = (len(out), len(out) + len(fact[i][1]))
        out += fact[i][1] + fact[i][2]
    return torch.tensor(out), answers
