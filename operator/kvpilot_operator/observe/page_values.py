"""What a page of metrics may say: each value is checked, since an engine that is broken or hostile may write anything.

Functions here raise ScrapeError, which names the series and the value, where it cannot be true.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache

from kvpilot_formats import dtypes, formats
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.numbers import whole
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import NOTHING_OBSERVED
from kvpilot_operator.state.snapshot import ModelFacts

# One pod holds a connection for each request; a process may open about a million files.
MOST_REQUESTS = 1_000_000
# Far beyond any machine and any uptime, and still exact enough to count with; a broken page may say anything.
MOST_COUNTED = 1e18
MOST_TOKENS = 10**12
# vLLM's histograms have some thirty. The bounds of a page are kept, so a page must not invent more at every scrape.
MOST_BUCKETS = 200
_LONGEST_BOUND = 32
# What status.kvCache.observedDtype holds.
LONGEST_DTYPE = 63
_HASH = re.compile(r"[0-9a-f]{4,64}")
# A page may name another dtype and policy at every scrape: each would be a write of the status, and a new series.
OTHER = "Other"
POLICIES = ("All", "SinksAndWindow", "HeavyHitters")
VLLM_DTYPES = (
    "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla", "turboquant_k8v4",
    "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit", "int4_per_token_head",
    "int8_per_token_head", "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
)  # fmt: skip
"""The dtypes of vLLM 0.32 that no service can ask for by our names."""
_DTYPES = frozenset((*dtypes.names(), *VLLM_DTYPES))


def counted(name: str, value: float) -> float:
    """A counter's value, or a gauge's that counts."""
    if not (math.isfinite(value) and value >= 0):
        raise ScrapeError(f"{name} is {value}: negative or not a number")
    return value


def whole_count(name: str, total: float) -> float:
    """The sum of a counter's series, as an int where it is whole: small ints cost no memory."""
    if total > MOST_COUNTED:
        raise ScrapeError(f"{name} is {total:g}: impossible, nothing counts beyond {MOST_COUNTED:g}")
    return int(total) if total.is_integer() else total


def requests(name: str, total: float) -> float:
    """How many requests run, or wait."""
    number = whole_count(name, total)
    if number > MOST_REQUESTS:
        raise ScrapeError(f"{name} is {number:g}: impossible, no process serves more than {MOST_REQUESTS} at once")
    return number


def total_of(name: str, total: float) -> float:
    """A sum that may fall."""
    if not abs(total) <= MOST_COUNTED:
        raise ScrapeError(f"{name} is {total}: not a number, or beyond {MOST_COUNTED:g}")
    return total


def add_bucket(name: str, reached: dict[str, float], edge: str, value: float) -> None:
    """Add a series to how many reached each bound."""
    reached[edge] = reached.get(edge, 0.0) + value
    if len(reached) > MOST_BUCKETS or len(edge) > _LONGEST_BOUND:
        raise ScrapeError(
            f"{name}: {len(reached)} bounds, one of {len(edge)} characters; no engine has more than "
            f"{MOST_BUCKETS} of {_LONGEST_BOUND}"
        )


def histogram(name: str, reached: Mapping[str, float], total: float) -> Histogram:
    """The histogram of how many reached each bound; an empty one where there are none."""
    if not reached:
        return NOTHING_OBSERVED
    bounds = _bounds(name, tuple(reached))
    counts: list[float] = []
    below = 0.0
    for edge in sorted(reached, key=float):
        upto = whole_count(f"{name}_bucket", reached[edge])
        if upto < below:
            raise ScrapeError(f"{name}_bucket: {upto:g} up to {edge} and {below:g} up to the bound before it")
        counts.append(int(upto - below))
        below = upto
    return Histogram(bounds, tuple(counts), total_of(f"{name}_sum", total))


@lru_cache(maxsize=256)
def _bounds(name: str, edges: tuple[str, ...]) -> tuple[float, ...]:
    """The finite bounds, rising; cached so that all pages of a fleet share one tuple."""
    try:
        rising = sorted(map(float, edges))
    except ValueError as error:
        raise ScrapeError(f"{name}_bucket: le: {error}") from error
    if rising[-1] != math.inf or any(not math.isfinite(bound) for bound in rising[:-1]):
        raise ScrapeError(f"{name}_bucket: le is {', '.join(edges)}; finite bounds and one +Inf are needed")
    if len(set(rising)) != len(rising):
        raise ScrapeError(f"{name}_bucket: le is {', '.join(edges)}: one bound twice")
    return tuple(rising[:-1])


def model_facts(labels: Mapping[str, str]) -> ModelFacts | None:
    """The model's sizes; None where one of them is none."""
    sizes = {f.name: labels.get(f.name, "") for f in fields(ModelFacts)}
    mla = sizes.pop("mla")
    if all(number(size) or size == "0" for size in sizes.values()) and mla in ("true", "false"):
        return ModelFacts(**{name: int(size) for name, size in sizes.items()}, mla=mla == "true")
    return None


def recent_tokens(text: str) -> int | None:
    """The tokens of a recent window; None where no engine has such a one."""
    tokens = number(text)
    return tokens if tokens in formats.RECENT_CHOICES and (tokens or text == "0") else None


def tokens(where: str, what: str, count: int) -> int:
    """How many tokens, or blocks of them, there is room for."""
    if count > MOST_TOKENS:
        raise ScrapeError(f"{where}: {what} is {count}: impossible, no memory holds more than {MOST_TOKENS} tokens")
    return count


def number(text: str) -> int:
    """A label's whole number; 0 where it is none ("None", as vLLM writes what it does not know)."""
    return whole(text, 10**15) or 0


def hash_of_factors(text: str) -> str:
    """One string for all pages that have it; empty where it is no hash."""
    return sys.intern(text) if _HASH.fullmatch(text) else ""


def policy(text: str) -> str:
    """Return a known policy, `OTHER` for an unknown one, and nothing for none."""
    return text if text in POLICIES or not text else OTHER


def dtype(text: str) -> str:
    """Return a known dtype, `OTHER` for an unknown one, and nothing for none."""
    return text if text in _DTYPES or not text else OTHER
