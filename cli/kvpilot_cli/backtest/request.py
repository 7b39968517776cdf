"""Requests to a simulated engine, and its limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Request:
    """One request. Lengths are in tokens, times in seconds since the start, -1 until they are known."""

    number: int
    arrival: float
    prompt: int
    output: int
    session: int = -1
    """Requests of one session share the beginning of their prompts."""
    computed: int = 0
    generated: int = 0
    blocks: int = 0
    first_token: float = -1.0
    last_token: float = -1.0
    finished: float = -1.0
    dropped: bool = False
    preempted: int = 0
    epoch: int = 0
    """Number of times that it stopped decoding. Each stop invalidates earlier forecasts of its end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that the engine was started with."""

    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True
    timeout: float = 120.0
    """Seconds without a first token after which clients give up."""
