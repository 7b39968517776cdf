"""Judge whether the pilot is ahead of other policies, on each load and over all loads."""

import math
from collections.abc import Sequence

from kvpilot_cli.backtest.compare import Row

EVEN_PERCENT = 2.0
"""Largest difference between two prices (GPU-hours per good request), in percent, at which they count as equal."""
MORE_PERCENT = 1.0
"""Difference in good requests, in percent of all requests, above which the policy with more of them is ahead."""
_WORDS = {"ahead": "ahead of", "equal": "equal to", "behind": "behind"}
SERVED_PERCENT = 99.0
"""Smallest percentage of good requests with which a policy counts as able to serve the load."""
RULE = (
    f"A policy serves a load if at least {SERVED_PERCENT:g}% of the requests are good. Of policies that do so, the one "
    "with fewer GPU-hours for a million good requests is ahead."
)


def judge(pilot: Row, other: Row) -> str:
    """Return whether the pilot is `ahead` of, `equal` to or `behind` the other policy.

    - If only one policy has SERVED_PERCENT of good requests or more, that policy is ahead.
    - If both have less, and their good requests differ by more than MORE_PERCENT of all requests, the policy with
      more of them is ahead.
    - Otherwise the policy with fewer GPU-hours per good request is ahead.
    """
    served = pilot.good_percent >= SERVED_PERCENT, other.good_percent >= SERVED_PERCENT
    if served[0] != served[1]:
        return "ahead" if served[0] else "behind"
    more = pilot.good_percent - other.good_percent
    if not served[0] and abs(more) > MORE_PERCENT:
        return "ahead" if more > 0 else "behind"
    if math.isinf(pilot.price) and math.isinf(other.price):
        return "equal"
    if abs(pilot.price - other.price) <= EVEN_PERCENT / 100 * min(pilot.price, other.price):
        return "equal"
    return "ahead" if pilot.price < other.price else "behind"


def verdict(rows: Sequence[Row]) -> str:
    """Return a sentence that compares the pilot with each other policy on a load; empty without a pilot or a rival."""
    pilot = next((r for r in rows if r.policy == "pilot"), None)
    if pilot is None or len(rows) == 1:
        return ""
    served = "served" if pilot.good_percent >= SERVED_PERCENT else "not served"
    found = {word: [r.policy for r in rows if r is not pilot and judge(pilot, r) == word] for word in _WORDS}
    told = [f"{_WORDS[word]} {', '.join(names)}" for word, names in found.items() if names]
    return f"{pilot.load}: {served} by the pilot ({pilot.good_percent:.2f}% good), {'; '.join(told)}"


def summary(rows: Sequence[Row]) -> str:
    """Return a sentence that compares the pilot with each other policy over all loads; empty without a pilot."""
    pilots = [r for r in rows if r.policy == "pilot"]
    pairs = [judge(pilot, r) for pilot in pilots for r in rows if r.load == pilot.load and r is not pilot]
    if not pairs:
        return ""
    served = sum(r.good_percent >= SERVED_PERCENT for r in pilots)
    counts = ", ".join(f"{pairs.count(word)} {word}" for word in _WORDS)
    return f"Verdict: the pilot serves {served} of {len(pilots)} loads; of {len(pairs)} comparisons: {counts}"


def told(rows: Sequence[Row]) -> list[str]:
    """Return the sentences of `verdict` for each load, and then the sentence of `summary`; empty without a pilot."""
    loads = dict.fromkeys(r.load for r in rows)
    found = [verdict([r for r in rows if r.load == load]) for load in loads]
    return [one for one in (*found, summary(rows)) if one]
