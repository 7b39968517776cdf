"""A real engine in its own process, and the error of its page check's answers."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from support.own_process import ask


def off(loses: bool = False, **environment: str) -> float:
    """Ask one; `loses` replaces the first entry of each block table before the step of all requests."""
    found: float = ask("support.page_checked", {"loses": loses}, **environment)["off"]
    return found


def main() -> None:
    """Answer the request on stdin."""
    loses = json.load(sys.stdin)["loses"]
    from vllm import LLM

    from kvpilot_runtime.backends import page_check
    from kvpilot_smallmodels.models import tiny_llama

    found: list[float] = []
    stock_off, stock_step = page_check._off, page_check._step

    def measured(*args: Any) -> float:
        found.append(stock_off(*args))
        return 0.0

    def step(config: Any, layer: Any, requests: Any, table: torch.Tensor) -> torch.Tensor:
        if loses and len(requests) > 1:
            table[:, 0] = 0
        return stock_step(config, layer, requests, table)

    vars(page_check).update(_off=measured, _step=step)
    LLM(model=str(tiny_llama()), kv_cache_dtype="k4v4", max_model_len=256, kv_cache_memory_bytes=16 << 20,
        max_num_batched_tokens=48, max_num_seqs=8, enforce_eager=True)  # fmt: skip
    print(json.dumps({"off": max(found)}), flush=True)


if __name__ == "__main__":
    main()
