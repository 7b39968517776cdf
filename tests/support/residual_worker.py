"""Methods for a stepped engine's workers, one worker per rank (vLLM's `worker_extension_cls`)."""

from dataclasses import fields
from typing import Any

import torch

from kvpilot_runtime.backends.packed import our_layers


class ResidualWorker:
    """Methods that vLLM adds to each of its workers."""

    vllm_config: Any
    model_runner: Any

    def rows_of(self, requests: list[str]) -> list[int]:
        """Return the row of each request in the batch."""
        rows = self.model_runner.input_batch.req_id_to_index
        return [rows[request] for request in requests]

    def poison(self, blocks: list[int], seed: int) -> None:
        """Fill blocks of all layers with random bytes."""
        rng = torch.Generator().manual_seed(seed)
        for layer in our_layers(self.vllm_config).values():
            for block in blocks:
                page = layer.kv_cache[block]
                page.copy_(torch.randint(0, 256, page.shape, generator=rng, dtype=torch.uint8))

    def factors_of_rank(self) -> list[list[Any]]:
        """Return the tensors of `Factors` for each layer, as lists [kv_heads of this rank, D]."""
        found = [layer.impl.factors(layer) for layer in our_layers(self.vllm_config).values()]
        return [[getattr(one, field.name).tolist() for field in fields(one)] for one in found]
