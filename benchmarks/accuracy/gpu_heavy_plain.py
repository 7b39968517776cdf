"""Expected results for gpu_heavy.py, from plain transformers in float32 that attend only to pages of a request."""

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM

from kvpilot_formats import formats
from kvpilot_kernels.reference.attention import round_trip
from kvpilot_runtime.bounded.heavy import measured_rows
from kvpilot_runtime.bounded.heavy_spec import lightest
from kvpilot_runtime.config.retention import HeavyHitters

_NAME = "kvpilot_heavy_plain"
NAMES = ("left", "left again", "freed pages overwritten", "first pages overwritten")
"""Names of the turns. A turn is one run of all requests."""


class Plain:
    """Model whose keys and values go through the codec of `dtype`, on a GPU if there is one."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.codec = None if dtype == "auto" else formats.parse(dtype)
        self.seen, self.given = torch.ones(0, 0, dtype=torch.bool), torch.zeros(0, 0)
        AttentionInterface.register(_NAME, self._attention)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=_NAME)
        self.model = model.to(self.device).eval()

    @torch.inference_mode()
    def __call__(self, prompt: list[int], answer: list[int], seen: torch.Tensor) -> tuple[list[float], torch.Tensor]:
        """Return two results for one answer.

        The first has, for each answer token, the difference between its logit and the largest logit. The second is the
        attention, float64 [tokens, tokens], summed over heads and layers.

        Args:
            seen: bool mask [tokens, tokens] of keys that each query may attend to.
        """
        tokens = torch.tensor([prompt + answer[:-1]], device=self.device)
        count = tokens.shape[1]
        self.seen = seen.to(self.device) & torch.ones(count, count, dtype=torch.bool, device=self.device).tril_()
        self.given = torch.zeros(count, count, dtype=torch.float64, device=self.device)
        logits = self.model(tokens, use_cache=False, logits_to_keep=len(answer)).logits[0].double()
        chosen = logits.gather(1, torch.tensor(answer, device=self.device)[:, None])[:, 0]
        below: list[float] = (logits.amax(1) - chosen).tolist()
        return below, self.given.cpu()

    def _attention(
        self, _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, __: Any, *, scaling: float,
        **_more: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        if self.codec is not None:
            key, value = (
                round_trip(x.transpose(1, 2), self.codec, side).transpose(1, 2)
                for x, side in ((key, "key"), (value, "value"))
            )
        key, value = (x.double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = (query.double() @ key.transpose(2, 3)) * scaling
        p = scores.masked_fill(~self.seen, -torch.inf).softmax(-1)
        self.given += p[0].sum(0)
        return (p @ value).transpose(1, 2).to(query.dtype), None


def last_life(steps: list[list[Any]]) -> list[list[Any]]:
    """Return the steps of a request since its last restart after a preemption, or all steps without one."""
    begins = [i for i, step in enumerate(steps) if i == 0 or step[0] < sum(steps[i - 1][:2])]
    return steps[begins[-1] :]


def held(steps: list[list[Any]], page: int, length: int) -> torch.Tensor:
    """Return a mask, bool [queries, keys]: True if the request held the key's page in the query's step.

    Queries of a prefix that came from the prefix cache attend to all pages.
    """
    mask = torch.ones(length, length, dtype=torch.bool)
    for before, new, places, *_ in steps:
        seen = torch.zeros(-(-length // page), page, dtype=torch.bool)
        seen[[place for place in places if place < len(seen)]] = True
        mask[before : before + new] = seen.flatten()[:length]
    return mask


def by_page(x: torch.Tensor, page: int) -> torch.Tensor:
    """Sum `x`, float64 [tokens], over the tokens of each page."""
    return functional.pad(x, (0, -len(x) % page)).view(-1, page).sum(1)


def best(turn: dict[str, Any], prompts: list[list[int]], plain: Plain, page: int) -> float:
    """Return the share of a turn's answer tokens that plain transformers would also choose.

    Transformers then attend only to pages (of `page` tokens) that the request held in the engine's step.
    """
    found: list[float] = []
    for i, (prompt, answer) in enumerate(zip(prompts, turn["answers"], strict=True)):
        steps = last_life(turn["steps"][str(i)])
        found += plain(prompt, answer, held(steps, page, len(prompt) + len(answer) - 1))[0]
    return sum(x <= 0 for x in found) / len(found)


def judge(
    turns: list[dict[str, Any]], prompts: list[list[int]], plain: Plain, bound: HeavyHitters, page: int
) -> dict[str, Any]:
    """Compare an engine's turns with each other, and the first turn with plain transformers. Return the results.

    `masses` has the error of a page's attention mass in a step, relative to the mean mass of a page. As a control it
    also has the error of comparing with the mass of the next page.

    `freed_over_lightest` is the mass of the freed pages, divided by that of the pages that should have been freed.

    Args:
        turns: the engine's `Turn`s, in the order of `NAMES`.
        bound: the engine's limit on pages of a sequence.
        page: tokens of a page.
    """
    first = turns[0]
    below: dict[str, list[float]] = {"held": [], "whole": []}
    off: list[float] = []
    shifted: list[float] = []
    ratios: list[float] = []
    same = middle = 0
    for i, (prompt, answer) in enumerate(zip(prompts, first["answers"], strict=True)):
        steps = last_life(first["steps"][str(i)])
        length = len(prompt) + len(answer) - 1
        found, given = plain(prompt, answer, held(steps, page, length))
        below["held"] += found
        below["whole"] += plain(prompt, answer, torch.ones(length, length, dtype=torch.bool))[0]
        masses = torch.zeros(-(-length // page), dtype=torch.float64)
        had = list(range(-(-steps[0][0] // page)))
        ahead: list[tuple[int, torch.Tensor]] = []  # last token and masses of steps whose results have not arrived yet
        for before, new, places, weighed, alone, known in steps:
            for end, mass in ahead:
                if end <= known:
                    masses[: len(mass)] += mass
            ahead = [one for one in ahead if one[0] > known]
            whole = [at for at in had if at < -(-known // page)]
            light = lightest(bound, page, whole, dict(enumerate(masses.tolist())), known)
            gone = [at for at in had if at not in places]
            if gone:
                same += set(gone) == set(light)
                ratios.append(float(masses[gone].sum() / masses[light].sum().clamp(min=1e-9)))
                middle += any(min(gone) > at >= bound.sink_pages(page) for at in places)
            had = places
            rows, weight = measured_rows(new, alone)
            if bool(rows) != (weighed is not None):
                raise RuntimeError(f"request {i}: {rows} rows are to be measured of a step that was given {weighed}")
            if not rows:
                continue
            mass = by_page(given[before + new - rows : before + new].sum(0), page) * weight
            ahead.append((before + new, mass))
            wanted, got = mass[places], torch.tensor(weighed, dtype=torch.float64)
            off.append(float((got - wanted).abs().mean() / wanted.mean()))
            shifted.append(float((got.roll(1) - wanted).abs().mean() / wanted.mean()))
    equal = {
        name: sum(map(list.__eq__, turn["answers"], first["answers"])) for name, turn in zip(NAMES, turns, strict=True)
    }
    places = [{i: [step[:3] for step in steps] for i, steps in turn["steps"].items()} for turn in turns]
    held_equal = {name: sum(own[i] == places[0][i] for i in own) for name, own in zip(NAMES, places, strict=True)}
    return {
        "requests": len(prompts), "answers_equal": equal, "pages_held_equal": held_equal, "pages_freed": first["freed"],
        "pages_freed_by_turn": [turn["freed"] for turn in turns], "preempted": first["preempted"],
        "cached_tokens": first["cached"], "pages_left": sum(turn["left"] for turn in turns),
        "tokens_that_are_the_best": {k: sum(x <= 0 for x in v) / len(v) for k, v in below.items()},
        "tokens_that_are_the_best_with_freed_pages_overwritten": best(turns[2], prompts, plain, page),
        "logits_below_the_best": {k: sum(v) / len(v) for k, v in below.items()},
        "masses": {"steps": len(off), "mean_off": sum(off) / len(off), "most_off": max(off),
                   "mean_off_of_the_next_page": sum(shifted) / len(shifted)},
        "frees": len(ratios), "frees_that_are_the_lightest": same, "frees_with_an_older_page_kept": middle,
        "freed_over_lightest": {"mean": sum(ratios) / len(ratios), "most": max(ratios)},
    }  # fmt: skip
