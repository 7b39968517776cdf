"""vLLM's page of metrics: from the text of /metrics to the numbers that decisions need.

A page is read chunk by chunk (`series.py`) and added up at once: what is held is the same for a page of any size.

Read against the sources of vLLM 0.28, 0.30 and 0.32, which agree on every name. Two are accepted in their older
spelling too: a page that has both says the same twice, and the newer one is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.observe import page_values as values
from kvpilot_operator.observe import ranks
from kvpilot_operator.observe.pod_metrics import DONE, PodMetrics, Totals
from kvpilot_operator.observe.series import SeriesReader, labels_of
from kvpilot_operator.state.histogram import Histogram
from kvpilot_operator.state.snapshot import ModelFacts

# The newer spelling first.
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_ITL = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
# Of the waiting requests, those that wait for room; others wait for a grammar, an adapter or a transfer (from 0.28).
_WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
_HTTP = "http_requests_total"
_CONFIG = "vllm:cache_config_info"
_MODEL = "kvpilot_model_info"
_FACTORS = "kvpilot_calibration_info"
_RECENT = "kvpilot_recent_window_info"
_RETENTION = "kvpilot_retention_info"
# Tokens of prompts by the tier that had them, from vLLM 0.32 on.
_SOURCES = "vllm:prompt_tokens_cached_by_source_total"
_START = "process_start_time_seconds"

# By the field of `Totals`.
_COUNTED = {
    "preemptions": "vllm:num_preemptions_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "host_hits": "vllm:external_prefix_cache_hits_total",
    "finished": "vllm:request_success_total",
}
_SECONDS = {
    "prefill_seconds": "vllm:request_prefill_time_seconds_sum",
    "decode_seconds": "vllm:request_decode_time_seconds_sum",
}
_HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds",),
    "itl": _ITL,
    "prompt_lengths": ("vllm:request_prompt_tokens",),
    "generation_lengths": ("vllm:request_generation_tokens",),
}

# Read for each engine of a page, too.
_DONE = tuple(_COUNTED[field] for field in DONE)
_OF_A_RANK = {
    **{name: f"{ranks.USAGE} {name}" for name in _USAGE},
    **dict.fromkeys(_DONE, ranks.DONE),
    _RUNNING: ranks.RUNNING,
    _WAITING: ranks.WAITING,
}
# Of these a part is counted by itself, told by a label.
_PARTED = (_WAITING_BY_REASON, _COUNTED["finished"], _HTTP, _SOURCES)
_COUNTERS = frozenset((*_COUNTED.values(), *_PARTED, _RUNNING, _WAITING, _START))
_BUCKETS = {f"{name}_bucket": name for names in _HISTOGRAMS.values() for name in names}
# Seconds and lengths, which a request that failed may lower.
_SUMS = frozenset([*_SECONDS.values(), *(f"{name}_sum" for name in _BUCKETS.values())])
_INFO = (_CONFIG, _MODEL, _FACTORS, _RECENT, _RETENTION)
WANTED = frozenset(name.encode() for name in (*_USAGE, *_COUNTERS, *_SUMS, *_BUCKETS, *_INFO))
"""The names of the series that are read."""


def parse_page(text: str) -> PodMetrics:
    """Read a whole page; raises ScrapeError, as `PageReader` does."""
    reader = PageReader()
    for _ in reader.steps(text.encode("utf-8", errors="replace")):
        pass
    return reader.close()


class PageReader:
    """Takes one page of Prometheus text in chunks.

    `steps` and `close` raise ScrapeError: the page is larger than one may be, use of the cache is missing, a line
    cannot be read, or a value cannot be true (negative, not a number, infinite, a share above 1, buckets that fall or
    are too many, more requests than a process has connections, more tokens than memory holds, a dtype too long to be
    one).
    """

    def __init__(self) -> None:
        self._series = SeriesReader(WANTED, self._add)
        # One series an engine (data-parallel ranks): the fullest one's share counts, all else adds up.
        self._shares: dict[str, float] = {}
        self._ranks = ranks.Ranks()
        self._sums: dict[str, float] = {}
        self._buckets: dict[str, dict[str, float]] = {}
        self._for_room: float | None = None
        self._errors = self._server_errors = self._disk_hits = 0.0
        self._capacity = self._blocks = 0
        self._dtypes: list[str] = []
        self._model: ModelFacts | None = None
        self._factors = ""
        self._recent: int | None = None
        self._retention = ""

    @property
    def work(self) -> int:
        """What has been read so far (`SeriesReader.work`)."""
        return self._series.work

    def steps(self, chunk: bytes) -> Iterator[None]:
        """Read the next bytes of the page while it is gone through, a small step at a time."""
        return self._series.steps(chunk)

    def close(self) -> PodMetrics:
        """What the page said; it is over."""
        self._series.close()
        usage_name = _first(_USAGE, self._shares)
        if usage_name is None:
            raise ScrapeError(f"none of {', '.join(_USAGE)} is on the page: is this a vLLM server?")
        waiting = self._for_room if self._for_room is not None else self._sums.get(_WAITING, 0.0)
        return PodMetrics(
            usage=self._shares[usage_name],
            running=values.requests(_RUNNING, self._sums.get(_RUNNING, 0.0)),
            waiting=values.requests(_WAITING, waiting),
            capacity_tokens=values.tokens(_CONFIG, "the capacity", self._capacity),
            blocks=values.tokens(_CONFIG, "num_gpu_blocks", self._blocks),
            # Ranks that differ are told as such: no dtype has such a name.
            dtype="+".join(self._dtypes)[: values.LONGEST_DTYPE],
            process_start=self._count(_START) if _START in self._sums else None,
            totals=self._totals(),
            model=self._model,
            factors=self._factors,
            recent_tokens=self._recent,
            retention=self._retention,
            older_names=tuple(
                name for name in (usage_name, _first(_ITL, self._buckets)) if name in (_USAGE[1], _ITL[1])
            ),
            ranks=self._ranks.close(_OF_A_RANK[usage_name], sum(map(self._count, _DONE))),
        )

    def _add(self, name: str, labels: str, value: float) -> None:
        """One series more."""
        if name in _COUNTERS:
            self._sums[name] = self._sums.get(name, 0.0) + values.counted(name, value)
            if name in _OF_A_RANK:
                self._ranks.add(_OF_A_RANK[name], labels_of(labels), value)
            if name in _PARTED:
                self._add_part(name, labels_of(labels), value)
        elif name in _BUCKETS:
            reached = self._buckets.setdefault(_BUCKETS[name], {})
            values.add_bucket(name, reached, labels_of(labels).get("le", ""), values.counted(name, value))
        elif name in _SUMS:
            self._sums[name] = self._sums.get(name, 0.0) + value
        elif name in _USAGE:
            if not 0.0 <= value <= 1.0:
                raise ScrapeError(f"{name} is {value}, not a share between 0 and 1")
            self._shares[name] = max(value, self._shares.get(name, 0.0))
            self._ranks.add(_OF_A_RANK[name], labels_of(labels), value)
        elif name == _CONFIG:
            self._add_config(labels_of(labels))
        elif name == _FACTORS:
            self._factors = self._factors or values.hash_of_factors(labels_of(labels).get("hash", ""))
        elif name == _RECENT:
            self._recent = values.recent_tokens(labels_of(labels).get("tokens", ""))
        elif name == _RETENTION:
            self._retention = values.policy(labels_of(labels).get("policy", ""))
        elif self._model is None:
            self._model = values.model_facts(labels_of(labels))

    def _add_part(self, name: str, labels: Mapping[str, str], value: float) -> None:
        if name == _WAITING_BY_REASON and labels.get("reason") == "capacity":
            self._for_room = (self._for_room or 0.0) + value
            self._ranks.add(ranks.FOR_ROOM, labels, value)
        elif name == _COUNTED["finished"] and labels.get("finished_reason") == "error":
            self._errors += value
        elif name == _SOURCES and labels.get("source") == "disk":
            self._disk_hits += value
        elif (
            name == _HTTP and labels.get("status", "").startswith("5") and labels.get("handler", "").startswith("/v1/")
        ):
            self._server_errors += value

    def _add_config(self, labels: Mapping[str, str]) -> None:
        blocks, dtype = values.number(labels.get("num_gpu_blocks", "")), labels.get("cache_dtype", "")
        if len(dtype) > values.LONGEST_DTYPE:
            raise ScrapeError(f"{_CONFIG}: cache_dtype has {len(dtype)} characters: no dtype's name has so many")
        self._blocks += blocks
        self._capacity += values.number(labels.get("kv_cache_size_tokens", "")) or blocks * values.number(
            labels.get("block_size", "")
        )
        if (known := values.dtype(dtype)) and known not in self._dtypes and len(self._dtypes) < 2:
            self._dtypes.append(known)

    def _totals(self) -> Totals:
        counts: dict[str, Any] = {field: self._count(name) for field, name in _COUNTED.items()}
        counts |= {field: self._sum(name) for field, name in _SECONDS.items()}
        counts |= {field: self._histogram(_first(names, self._buckets) or "") for field, names in _HISTOGRAMS.items()}
        errors = values.whole_count(_COUNTED["finished"], self._errors)
        counts["disk_hits"] = values.whole_count(_SOURCES, self._disk_hits)
        return Totals(errors=errors, server_errors=values.whole_count(_HTTP, self._server_errors), **counts)

    def _count(self, name: str) -> float:
        return values.whole_count(name, self._sums.get(name, 0.0))

    def _sum(self, name: str) -> float:
        return values.total_of(name, self._sums.get(name, 0.0))

    def _histogram(self, name: str) -> Histogram:
        """The histogram over all of its series."""
        return values.histogram(name, self._buckets.get(name, {}), self._sums.get(f"{name}_sum", 0.0))


def _first(names: tuple[str, ...], found: Collection[str]) -> str | None:
    """The newest spelling that is there."""
    return next((name for name in names if name in found), None)
