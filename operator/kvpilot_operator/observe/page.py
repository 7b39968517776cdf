"""vLLM's page of metrics: from the text of /metrics to the numbers that decisions need.

Read against the sources of vLLM 0.28, 0.30 and 0.32, which agree on every name. Two are accepted in their older
spelling too: a page that has both says the same twice, and the newer one is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.snapshot import ModelFacts

_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_ITL = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
# Of the waiting requests, those that wait for room; others wait for a grammar, an adapter or a transfer (from 0.28).
_WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
_FINISHED = "vllm:request_success_total"
_HTTP = "http_requests_total"
_CONFIG = "vllm:cache_config_info"
_MODEL = "kvpilot_model_info"
_START = "process_start_time_seconds"

_PREEMPTIONS = "vllm:num_preemptions_total"
_PROMPT_TOKENS = "vllm:prompt_tokens_total"
_GENERATION_TOKENS = "vllm:generation_tokens_total"
_PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
_PREFIX_HITS = "vllm:prefix_cache_hits_total"
_PREFILL = "vllm:request_prefill_time_seconds_sum"
_DECODE = "vllm:request_decode_time_seconds_sum"

_TTFT = "vllm:time_to_first_token_seconds"
_PROMPT_LENGTHS = "vllm:request_prompt_tokens"
_GENERATION_LENGTHS = "vllm:request_generation_tokens"

_WANTED = frozenset(
    [*_USAGE, _RUNNING, _WAITING, _WAITING_BY_REASON, _FINISHED, _HTTP, _CONFIG, _MODEL, _START]
    + [_PREEMPTIONS, _PROMPT_TOKENS, _GENERATION_TOKENS, _PREFIX_QUERIES, _PREFIX_HITS, _PREFILL, _DECODE]
    + [f"{name}_{part}" for name in (*_ITL, _TTFT, _PROMPT_LENGTHS, _GENERATION_LENGTHS) for part in ("bucket", "sum")]
)
_NOTHING = Histogram()

# One pod holds a connection for each request; a process may open about a million files.
MOST_REQUESTS = 1_000_000
# Far beyond any machine and any uptime, and still exact enough to count with; a broken page may say anything.
MOST_COUNTED = 1e18
MOST_TOKENS = 10**12
# vLLM's histograms have some thirty. The bounds of a page are kept, so a page must not invent more at every scrape.
MOST_BUCKETS = 200
_LONGEST_BOUND = 32
# What status.kvCache.observedDtype holds.
_LONGEST_DTYPE = 63
_EXCERPT = 100

_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")

_Series = tuple[Mapping[str, str], float]


@dataclass(frozen=True, slots=True)
class Totals:
    """What an engine counted since its process started. Counts are never negative."""

    preemptions: float = 0
    prompt_tokens: float = 0
    generation_tokens: float = 0
    prefix_queries: float = 0
    """Prompt tokens looked up in the prefix cache, and those of them that it held."""
    prefix_hits: float = 0
    finished: float = 0
    """Requests whose end the engine saw, errors included. Those whose client left are mostly not among them."""
    errors: float = 0
    """Of them, those that ended in an error of the engine (finished_reason "error")."""
    server_errors: float = 0
    """HTTP answers 5xx of the API (/v1/...)."""
    prefill_seconds: float = 0.0
    """Over finished requests; one that failed before its first token may lower it, in vLLM, even below zero."""
    decode_seconds: float = 0.0
    ttft: Histogram = _NOTHING
    itl: Histogram = _NOTHING
    prompt_lengths: Histogram = _NOTHING
    generation_lengths: Histogram = _NOTHING


@dataclass(frozen=True, slots=True)
class PodMetrics:
    """One pod's page."""

    usage: float
    """Share of the KV blocks in use, 0 to 1."""
    usage_name: str
    running: float
    waiting: float
    """Requests that wait for room in a batch or in the cache."""
    capacity_tokens: int
    """0 where the page does not say it."""
    blocks: int
    """KV blocks, 0 where the page does not say it."""
    dtype: str
    itl_name: str = ""
    """The name that inter-token latency was read under; empty where the page has none."""
    process_start: float | None = None
    """Unix time at which the API server's process started; vLLM with several API servers does not say it."""
    totals: Totals = Totals()
    model: ModelFacts | None = None

    @property
    def older_names(self) -> tuple[str, ...]:
        """The names on this page that newer vLLMs have given up."""
        return tuple(name for name in (self.usage_name, self.itl_name) if name in (_USAGE[1], _ITL[1]))


def parse_page(text: str) -> PodMetrics:
    """Read a page of Prometheus text.

    Raises:
        ScrapeError: use of the cache is missing, a line cannot be read, or a value cannot be true (negative, not a
            number, infinite, a share above 1, buckets that fall or are too many, more requests than a process has
            connections, more tokens than memory holds, a dtype too long to be one).
    """
    found = _read(text)
    usage_name = next((name for name in _USAGE if name in found), None)
    if usage_name is None:
        raise ScrapeError(f"none of {', '.join(_USAGE)} is on the page: is this a vLLM server?")
    # One series an engine (data parallel ranks): shares are averaged, all else adds up.
    shares = [value for _, value in found[usage_name]]
    for share in shares:
        if not 0.0 <= share <= 1.0:
            raise ScrapeError(f"{usage_name} is {share}, not a share between 0 and 1")
    for_room = [s for s in found.get(_WAITING_BY_REASON, ()) if s[0].get("reason") == "capacity"]
    itl_name = next((name for name in _ITL if f"{name}_bucket" in found), "")
    config = [labels for labels, _ in found.get(_CONFIG, ())]
    starts = found.get(_START)
    return PodMetrics(
        usage=sum(shares) / len(shares),
        usage_name=usage_name,
        running=_requests(_RUNNING, found.get(_RUNNING, ())),
        waiting=_requests(_WAITING, for_room or found.get(_WAITING, ())),
        capacity_tokens=_tokens("the capacity", sum(map(_capacity, config))),
        blocks=_tokens("num_gpu_blocks", sum(_number(labels.get("num_gpu_blocks", "")) for labels in config)),
        dtype=_dtype(config[-1]) if config else "",
        itl_name=itl_name,
        process_start=_count(_START, starts) if starts else None,
        totals=_totals(found, itl_name),
        model=_model(found.get(_MODEL, ())),
    )


def _read(text: str) -> dict[str, list[_Series]]:
    """The wanted series by name. Most of a page is of no interest, so its lines are told apart by their name first."""
    found: dict[str, list[_Series]] = {}
    for line in text.split("\n"):  # a label may hold what else Python takes for the end of a line
        name = _NAME.match(line)
        if name is None or name[0] not in _WANTED:
            continue
        parts = _LINE.fullmatch(line.rstrip())
        try:
            if parts is None:
                raise ValueError("not a series and its value")
            found.setdefault(name[0], []).append((dict(_LABEL.findall(parts[2] or "")), float(parts[3])))
        except ValueError as error:
            raise ScrapeError(f"not Prometheus text: {line[:_EXCERPT]!r}: {str(error)[:_EXCERPT]}") from error
    return found


def _totals(found: Mapping[str, list[_Series]], itl_name: str) -> Totals:
    ended, answers = found.get(_FINISHED, ()), found.get(_HTTP, ())

    def count(name: str) -> float:
        return _count(name, found.get(name, ()))

    return Totals(
        preemptions=count(_PREEMPTIONS),
        prompt_tokens=count(_PROMPT_TOKENS),
        generation_tokens=count(_GENERATION_TOKENS),
        prefix_queries=count(_PREFIX_QUERIES),
        prefix_hits=count(_PREFIX_HITS),
        finished=count(_FINISHED),
        errors=_count(_FINISHED, [s for s in ended if s[0].get("finished_reason") == "error"]),
        server_errors=_count(_HTTP, [s for s in answers if _is_server_error(s[0])]),
        prefill_seconds=_sum(_PREFILL, found.get(_PREFILL, ())),
        decode_seconds=_sum(_DECODE, found.get(_DECODE, ())),
        ttft=_histogram(_TTFT, found),
        itl=_histogram(itl_name, found),
        prompt_lengths=_histogram(_PROMPT_LENGTHS, found),
        generation_lengths=_histogram(_GENERATION_LENGTHS, found),
    )


def _is_server_error(labels: Mapping[str, str]) -> bool:
    return labels.get("status", "").startswith("5") and labels.get("handler", "").startswith("/v1/")


def _count(name: str, series: Iterable[_Series]) -> float:
    """The sum of a counter's series, as an int where it is whole: small ints cost no memory."""
    total = 0.0
    for _, value in series:
        if not (math.isfinite(value) and value >= 0):
            raise ScrapeError(f"{name} is {value}: negative or not a number")
        total += value
    if total > MOST_COUNTED:
        raise ScrapeError(f"{name} is {total:g}: impossible, nothing counts beyond {MOST_COUNTED:g}")
    return int(total) if total.is_integer() else total


def _requests(name: str, series: Iterable[_Series]) -> float:
    number = _count(name, series)
    if number > MOST_REQUESTS:
        raise ScrapeError(f"{name} is {number:g}: impossible, no process serves more than {MOST_REQUESTS} at once")
    return number


def _histogram(name: str, found: Mapping[str, list[_Series]]) -> Histogram:
    """The histogram over all of its series; an empty one where the page has none."""
    reached: dict[str, float] = {}
    for labels, value in found.get(f"{name}_bucket", ()):
        edge = labels.get("le", "")
        reached[edge] = reached.get(edge, 0.0) + _count(f"{name}_bucket", [(labels, value)])
    if not reached:
        return _NOTHING
    if len(reached) > MOST_BUCKETS or max(map(len, reached)) > _LONGEST_BOUND:
        raise ScrapeError(
            f"{name}_bucket: {len(reached)} bounds, the longest of {max(map(len, reached))} characters; no engine has "
            f"more than {MOST_BUCKETS} of {_LONGEST_BOUND}"
        )
    bounds = _bounds(name, tuple(reached))
    counts: list[float] = []
    below = 0.0
    for edge in sorted(reached, key=float):
        upto = reached[edge]
        if upto < below:
            raise ScrapeError(f"{name}_bucket: {upto:g} up to {edge} and {below:g} up to the bound before it")
        counts.append(int(upto - below))
        below = upto
    return Histogram(bounds, tuple(counts), _sum(f"{name}_sum", found.get(f"{name}_sum", ())))


def _sum(name: str, series: Iterable[_Series]) -> float:
    total = sum(value for _, value in series)
    if not abs(total) <= MOST_COUNTED:
        raise ScrapeError(f"{name} is {total}: not a number, or beyond {MOST_COUNTED:g}")
    return total


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


def _model(series: Iterable[_Series]) -> ModelFacts | None:
    for labels, _ in series:
        sizes = {f.name: labels.get(f.name, "") for f in fields(ModelFacts)}
        mla = sizes.pop("mla")
        if all(_number(size) or size == "0" for size in sizes.values()) and mla in ("true", "false"):
            return ModelFacts(**{name: int(size) for name, size in sizes.items()}, mla=mla == "true")
    return None


def _capacity(labels: Mapping[str, str]) -> int:
    tokens = _number(labels.get("kv_cache_size_tokens", ""))
    return tokens or _number(labels.get("num_gpu_blocks", "")) * _number(labels.get("block_size", ""))


def _tokens(what: str, number: int) -> int:
    if number > MOST_TOKENS:
        raise ScrapeError(f"{_CONFIG}: {what} is {number}: impossible, no memory holds more than {MOST_TOKENS} tokens")
    return number


def _dtype(labels: Mapping[str, str]) -> str:
    dtype = labels.get("cache_dtype", "")
    if len(dtype) > _LONGEST_DTYPE:
        raise ScrapeError(f"{_CONFIG}: cache_dtype has {len(dtype)} characters: no dtype's name has so many")
    return dtype


def _number(text: str) -> int:
    """A label's whole number; 0 where it is none ("None", as vLLM writes what it does not know)."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else 0
