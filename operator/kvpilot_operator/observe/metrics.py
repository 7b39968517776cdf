"""vLLM's metrics: from the text of /metrics to the few numbers that decisions need."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvpilot_operator.errors import ScrapeError
from kvpilot_operator.state.snapshot import Sample

# A healthy engine's page is some hundred KiB; a pod that sends more is not believed.
MAX_PAGE_BYTES = 4 * 1024 * 1024
TIMEOUT_SECONDS = 5.0

# vLLM renamed the gauge in its V1 engine; both names are read, the new one first.
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_WANTED = {
    *_USAGE,
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
}


@dataclass(frozen=True, slots=True)
class PodMetrics:
    """One pod's page. Usage is a share (0 to 1); counters count from the engine's start."""

    usage: float
    usage_name: str
    running: float
    waiting: float
    preemptions: float
    capacity_tokens: int
    dtype: str


def parse_page(text: str) -> PodMetrics:
    """Read a page of Prometheus text; ScrapeError names what is missing or impossible."""
    sums: dict[str, float] = {}
    capacity, dtype = 0, ""
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in _WANTED:
                    # One series an engine (data parallel ranks): gauges of use are averaged below, the rest adds up.
                    sums[sample.name] = sums.get(sample.name, 0.0) + float(sample.value)
                    count = f"{sample.name}#"
                    sums[count] = sums.get(count, 0.0) + 1
                elif sample.name == "vllm:cache_config_info":
                    capacity += _capacity(sample.labels)
                    dtype = sample.labels.get("cache_dtype", "")
    except (ValueError, KeyError, IndexError) as error:
        raise ScrapeError(f"not Prometheus text: {error}") from error
    usage_name = next((name for name in _USAGE if name in sums), None)
    if usage_name is None:
        raise ScrapeError(f"none of {', '.join(_USAGE)} is on the page: is this a vLLM server?")
    usage = sums[usage_name] / sums[f"{usage_name}#"]
    metrics = PodMetrics(
        usage=usage,
        usage_name=usage_name,
        running=sums.get("vllm:num_requests_running", 0.0),
        waiting=sums.get("vllm:num_requests_waiting", 0.0),
        preemptions=sums.get("vllm:num_preemptions_total", 0.0),
        capacity_tokens=capacity,
        dtype=dtype,
    )
    _check(metrics)
    return metrics


def combine(time: datetime, pods: Sequence[PodMetrics]) -> Sample:
    """One revision's sample: sums, and use weighted by each pod's capacity."""
    capacity = sum(p.capacity_tokens for p in pods)
    weights = [p.capacity_tokens or 1 for p in pods]
    return Sample(
        time=time,
        pods=len(pods),
        usage=sum(p.usage * w for p, w in zip(pods, weights, strict=True)) / sum(weights),
        running=sum(p.running for p in pods),
        waiting=sum(p.waiting for p in pods),
        preemptions=sum(p.preemptions for p in pods),
        capacity_tokens=capacity,
        observed_dtype=pods[0].dtype,
    )


async def scrape(client: httpx.AsyncClient, url: str) -> PodMetrics:
    """Fetch and read one pod's /metrics within the limits on time and size."""
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS), client.stream("GET", f"{url}/metrics") as answer:
            if answer.status_code != 200:
                raise ScrapeError(f"{url}/metrics: HTTP {answer.status_code}")
            page = bytearray()
            async for chunk in answer.aiter_bytes():
                page += chunk
                if len(page) > MAX_PAGE_BYTES:
                    raise ScrapeError(f"{url}/metrics: more than {MAX_PAGE_BYTES} bytes")
    except (httpx.HTTPError, TimeoutError) as error:
        raise ScrapeError(f"{url}/metrics: {type(error).__name__}: {error}") from error
    return await asyncio.to_thread(parse_page, page.decode("utf-8", errors="replace"))


def _capacity(labels: dict[str, str]) -> int:
    tokens = labels.get("kv_cache_size_tokens", "")
    if tokens.isdigit():
        return int(tokens)
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0


def _check(metrics: PodMetrics) -> None:
    counts = (metrics.running, metrics.waiting, metrics.preemptions)
    if not 0.0 <= metrics.usage <= 1.0:
        raise ScrapeError(f"{metrics.usage_name} is {metrics.usage}, not a share between 0 and 1")
    if not all(math.isfinite(value) and value >= 0 for value in counts):
        raise ScrapeError("a count of requests is negative or not a number")
