"""What a simulated engine is asked, and how it was started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Request:
    """One request; lengths in tokens, times in seconds since the start, -1 until they are known."""

    number: int
    arrival: float
    prompt: int
    output: int
    session: int = -1
    """Requests of one session share their prompt's beginning with all that the session computed before."""
    computed: int = 0
    generated: int = 0
    blocks: int = 0
    first_token: float = -1.0
    last_token: float = -1.0
    finished: float = -1.0
    dropped: bool = False
    preempted: int = 0
    epoch: int = 0
    """How often it stopped decoding: an end that was foreseen before is void."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How the engine was started."""

    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True
    timeout: float = 120.0
    """Clients give up after so many seconds without a first token."""
