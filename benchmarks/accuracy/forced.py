"""Logits processor by which a vLLM engine answers with given tokens, one in each decode step."""

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

ANSWER = "forced"
"""Key of a request's `SamplingParams.extra_args` with the token IDs of its answer."""


class Forced(AdapterLogitsProcessor):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """Processor of requests that have `ANSWER`. Other requests are not changed."""

    def is_argmax_invariant(self) -> bool:
        """Return False: the processor changes the most likely token."""
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """Return the function that forces a request's next token, or None."""
        if (answer := (params.extra_args or {}).get(ANSWER)) is None:
            return None

        def force(given: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(given) < len(answer):
                logits.fill_(-torch.inf)[answer[len(given)]] = 0
            return logits

        return force
