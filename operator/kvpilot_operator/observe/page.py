"""Parse vLLM's /metrics page (metric names of vLLM 0.32) into the numbers that decisions need.

Every value is checked, because a broken or hostile engine may write anything.
"""

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from kvpilot_formats import dtypes, formats
from kvpilot_formats.untrusted import whole
from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe import pod_metrics as engine
from kvpilot_operator.observe.pod_metrics import PodMetrics, Ranks, Totals
from kvpilot_operator.observe.series import SeriesReader, labels_of
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.samples import NOTHING_OBSERVED
from kvpilot_operator.state.snapshot import ModelFacts

_USAGE = "vllm:kv_cache_usage_perc"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
# vLLM counts waiting requests by reason. Count only those that wait for capacity, not for a grammar, an adapter or a
# transfer.
_WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
_HTTP = "http_requests_total"
_CONFIG = "vllm:cache_config_info"
_MODEL = "kvpilot_model_info"
_FACTORS = "kvpilot_calibration_info"
_RECENT = "kvpilot_recent_window_info"
_START = "process_start_time_seconds"

# Map each field of `Totals` to the name of its counter.
_COUNTED = {
    "preemptions": "vllm:num_preemptions_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "host_hits": "vllm:external_prefix_cache_hits_total",
    "finished": "vllm:request_success_total",
    "asked_tokens": "vllm:request_params_max_tokens_sum",
}
_SECONDS = {
    "prefill_seconds": "vllm:request_prefill_time_seconds_sum",
    "decode_seconds": "vllm:request_decode_time_seconds_sum",
}
_HISTOGRAMS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "generation_lengths": "vllm:request_generation_tokens",
}

# Metrics that are also collected for each engine of a page, with their names in `Ranks`.
_DONE = tuple(_COUNTED[field] for field in engine.DONE_COUNTS)
_OF_A_RANK = {**dict.fromkeys(_DONE, engine.DONE), _RUNNING: engine.RUNNING, _WAITING: engine.WAITING}
# Metrics of which a part is also summed separately: the series whose labels pass the part's test.
_PARTS: Mapping[str, Mapping[str, Callable[[Mapping[str, str]], bool]]] = {
    _WAITING_BY_REASON: {"waiting": lambda labels: labels.get("reason") == "capacity"},
    _COUNTED["finished"]: {
        "errors": lambda labels: labels.get("finished_reason") == "error",
        "stopped": lambda labels: labels.get("finished_reason") == "stop",
    },
    _HTTP: {
        "server_errors": lambda labels: (
            labels.get("status", "").startswith("5") and labels.get("handler", "").startswith("/v1/")
        )
    },
}
_COUNTERS = frozenset((*_COUNTED.values(), *_PARTS, _RUNNING, _WAITING, _START))
_BUCKETS = {f"{name}_bucket": name for name in _HISTOGRAMS.values()}
# Failed requests may lower these sums, so accept negative values.
_SUMS = frozenset([*_SECONDS.values(), *(f"{name}_sum" for name in _HISTOGRAMS.values())])
_INFO = (_CONFIG, _MODEL, _FACTORS, _RECENT)
WANTED = frozenset(name.encode() for name in (_USAGE, *_COUNTERS, *_SUMS, *_BUCKETS, *_INFO))

# Limit of plausible requests: each needs a connection, and a process can open about a million files.
MOST_REQUESTS = 1_000_000
# No real counter gets this large, and floats below it are exact enough.
MOST_COUNTED = 1e18
MOST_TOKENS = 1e12
# vLLM's histograms have about thirty buckets. The limit bounds a cache of bucket bounds, to which a hostile page could
# add new ones at every scrape.
MOST_BUCKETS = 200
_LONGEST_BOUND = 32
# status.kvCache.observedDtype has this maximum length.
_LONGEST_DTYPE = 63
_HASH = re.compile(r"[0-9a-f]{4,64}")
# Text in place of unknown names. New names at each scrape would cause status writes and new time series.
OTHER = "Other"
_DTYPES = (*dtypes.names(), *formats.VLLM_DTYPES_LEFT_OUT)


class PageReader(SeriesReader):
    """A parser of one /metrics page. It raises ScrapeError if the KV cache use is missing or a value is impossible."""

    def __init__(self) -> None:
        super().__init__(WANTED)
        # Each engine (data-parallel rank) has its own series. Take the highest cache use, and add up everything else.
        self._usage: float | None = None
        self._ranks = Ranks()
        self._sums: dict[str, float] = {}
        self._buckets: dict[str, dict[str, float]] = {}
        self._parts: dict[str, float] = {}
        self._capacity = self._blocks = 0.0
        self._dtypes: list[str] = []
        self._model: ModelFacts | None = None
        self._factors = ""
        self._recent: int | None = None

    def close(self) -> PodMetrics:
        """Parse the last line, and return the numbers that the page reports."""
        self.end()
        if self._usage is None:
            raise ScrapeError(f"{_USAGE} is not on the page: is this a vLLM server?")
        waiting = self._parts.get("waiting", self._sums.get(_WAITING, 0.0))
        return PodMetrics(
            usage=self._usage,
            running=_count(_RUNNING, self._sums.get(_RUNNING, 0.0), MOST_REQUESTS),
            waiting=_count(_WAITING, waiting, MOST_REQUESTS),
            capacity_tokens=int(_count(f"{_CONFIG}: the capacity", self._capacity, MOST_TOKENS)),
            blocks=int(_count(f"{_CONFIG}: num_gpu_blocks", self._blocks, MOST_TOKENS)),
            # If ranks differ, join their dtypes, so that the result matches no real dtype.
            dtype="+".join(self._dtypes)[:_LONGEST_DTYPE],
            process_start=self._total(_START) if _START in self._sums else None,
            totals=self._totals(),
            model=self._model,
            factors=self._factors,
            recent_tokens=self._recent,
            ranks=self._ranks.close(sum(map(self._total, _DONE))),
        )

    def add(self, name: str, labels: str, value: float) -> None:
        """Add the value of one series to the sums of its metric."""
        if name in _COUNTERS:
            self._sums[name] = self._sums.get(name, 0.0) + _not_negative(name, value)
            if name in _OF_A_RANK:
                self._ranks.add(_OF_A_RANK[name], labels_of(labels), value)
            if name in _PARTS:
                self._add_parts(name, labels_of(labels), value)
        elif name in _BUCKETS:
            self._add_bucket(_BUCKETS[name], labels_of(labels).get("le", ""), _not_negative(name, value))
        elif name in _SUMS:
            self._sums[name] = self._sums.get(name, 0.0) + value
        elif name == _USAGE:
            if not 0.0 <= value <= 1.0:
                raise ScrapeError(f"{name} is {value}, not a share between 0 and 1")
            self._usage = max(value, self._usage or 0.0)
            self._ranks.add(engine.USAGE, labels_of(labels), value)
        else:
            self._add_info(name, labels_of(labels))

    def _add_parts(self, name: str, labels: Mapping[str, str], value: float) -> None:
        for part in [part for part, belongs in _PARTS[name].items() if belongs(labels)]:
            self._parts[part] = self._parts.get(part, 0.0) + value
            if name == _WAITING_BY_REASON:
                self._ranks.add(engine.FOR_ROOM, labels, value)

    def _add_bucket(self, name: str, edge: str, value: float) -> None:
        reached = self._buckets.setdefault(name, {})
        reached[edge] = reached.get(edge, 0.0) + value
        if len(reached) > MOST_BUCKETS or len(edge) > _LONGEST_BOUND:
            raise ScrapeError(
                f"{name}_bucket: {len(reached)} bounds, one of {len(edge)} characters; no engine has more than "
                f"{MOST_BUCKETS} of {_LONGEST_BOUND}"
            )

    def _add_info(self, name: str, labels: Mapping[str, str]) -> None:
        if name == _CONFIG:
            self._add_config(labels)
        elif name == _FACTORS:
            found = labels.get("hash", "")
            # Intern the string, so that all pages share one copy.
            self._factors = self._factors or (sys.intern(found) if _HASH.fullmatch(found) else "")
        elif name == _RECENT:
            tokens = whole(labels.get("tokens", ""), max(formats.RECENT_CHOICES))
            self._recent = tokens if tokens in formats.RECENT_CHOICES else None
        elif self._model is None:
            self._model = _model_facts(labels)

    def _add_config(self, labels: Mapping[str, str]) -> None:
        blocks, dtype = _number(labels.get("num_gpu_blocks", "")), labels.get("cache_dtype", "")
        if len(dtype) > _LONGEST_DTYPE:
            raise ScrapeError(f"{_CONFIG}: cache_dtype has {len(dtype)} characters: no dtype's name has so many")
        self._blocks += blocks
        size = _number(labels.get("block_size", ""))
        self._capacity += _number(labels.get("kv_cache_size_tokens", "")) or blocks * size
        known = dtype if dtype in _DTYPES or not dtype else OTHER
        if known and known not in self._dtypes and len(self._dtypes) < 2:
            self._dtypes.append(known)

    def _totals(self) -> Totals:
        counts: dict[str, Any] = {field: self._total(name) for field, name in _COUNTED.items()}
        counts |= {field: _sum(name, self._sums.get(name, 0.0)) for field, name in _SECONDS.items()}
        counts |= {field: self._histogram(name) for field, name in _HISTOGRAMS.items()}
        counts |= {
            part: _count(name, self._parts.get(part, 0.0))
            for name in (_COUNTED["finished"], _HTTP)
            for part in _PARTS[name]
        }
        return Totals(**counts)

    def _total(self, name: str) -> float:
        return _count(name, self._sums.get(name, 0.0))

    def _histogram(self, name: str) -> Histogram:
        """Return a histogram as the sum of all its series. It is empty if there are no series."""
        reached = self._buckets.get(name)
        if not reached:
            return NOTHING_OBSERVED
        bounds = _bounds(name, tuple(reached))
        counts: list[float] = []
        below = 0.0
        for edge in sorted(reached, key=float):
            upto = _count(f"{name}_bucket", reached[edge])
            if upto < below:
                raise ScrapeError(f"{name}_bucket: {upto:g} up to {edge} and {below:g} up to the bound before it")
            counts.append(int(upto - below))
            below = upto
        return Histogram(bounds, tuple(counts), _sum(f"{name}_sum", self._sums.get(f"{name}_sum", 0.0)))


def _not_negative(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ScrapeError(f"{name} is {value}: negative or not a number")
    return value


def _count(name: str, total: float, most: float = MOST_COUNTED) -> float:
    """Return the sum of a counter's series. Turn whole numbers into ints, because small ints share their memory."""
    if total > most:
        raise ScrapeError(f"{name} is {total:g}: impossible, no engine has more than {most:g}")
    return int(total) if total.is_integer() else total


def _sum(name: str, total: float) -> float:
    """Return the sum of series that may decrease, or raise ScrapeError if it is impossible."""
    if not abs(total) <= MOST_COUNTED:
        raise ScrapeError(f"{name} is {total}: not a number, or beyond {MOST_COUNTED:g}")
    return total


@lru_cache(maxsize=256)
def _bounds(name: str, edges: tuple[str, ...]) -> tuple[float, ...]:
    """Return the finite bounds in rising order. They are cached, so that all pages of a fleet share one tuple."""
    try:
        rising = sorted(map(float, edges))
    except ValueError as error:
        raise ScrapeError(f"{name}_bucket: le: {error}") from error
    if rising[-1] != math.inf or any(not math.isfinite(bound) for bound in rising[:-1]):
        raise ScrapeError(f"{name}_bucket: le is {', '.join(edges)}; finite bounds and one +Inf are needed")
    if len(set(rising)) != len(rising):
        raise ScrapeError(f"{name}_bucket: le is {', '.join(edges)}: one bound twice")
    return tuple(rising[:-1])


def _model_facts(labels: Mapping[str, str]) -> ModelFacts | None:
    """Return the model's architecture, such as its layers and head_dim, or None if one of its sizes is not a number."""
    sizes = {f.name: whole(labels.get(f.name), 10**15) for f in fields(ModelFacts) if f.name != "mla"}
    mla = labels.get("mla")
    if None in sizes.values() or mla not in ("true", "false"):
        return None
    known: dict[str, Any] = sizes
    return ModelFacts(**known, mla=mla == "true")


def _number(text: str) -> int:
    """Return a label's whole number; 0 for anything else (vLLM writes "None" for an unknown one)."""
    return whole(text, 10**15) or 0
