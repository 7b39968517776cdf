"""Methods for a stepped engine's workers, one worker per rank (vLLM's `worker_extension_cls`)."""

from dataclasses import fields
from typing import Any

import torch

from kvpilot_runtime.backends.packed import our_layers


class RingWorker:
    """Methods that vLLM adds to each of its workers."""

    vllm_config: Any
    model_runner: Any

    def rows_of(self, requests: list[str]) -> list[int]:
        """Return the row of each request in the batch."""
        rows = self.model_runner.input_batch.req_id_to_index
        return [rows[request] for request in requests]

    def poison_ring(self, block: int, other: int | None, seed: int) -> None:
        """Overwrite a ring page with another request's rows, or with random bytes.

        All rows are shifted by one place, so that no row has the tag that its place needs.

        Args:
            block: the page to overwrite.
            other: the page with the other request's rows; None for random bytes.
            seed: seed of the random bytes.
        """
        rng = torch.Generator().manual_seed(seed)
        context = self.vllm_config.compilation_config.static_forward_context
        for ring in (layer for name, layer in context.items() if name.endswith(".recent")):
            cache, impl = ring.kv_cache, ring.owner.impl
            layout = impl.fmt.ring_layout(impl.head_size, cache.shape[2])
            page = cache[block].flatten(1)
            if other is None:
                page.copy_(torch.randint(0, 256, page.shape, generator=rng, dtype=torch.uint8))
                continue
            rows = cache[other].flatten(1).clone()
            for region in (layout.key_digits, layout.value_digits, layout.meta):
                end = region.offset + region.rows * region.row_bytes
                part = rows[:, region.offset : end]
                if region is layout.meta:
                    words = part.reshape(part.shape[0], -1, layout.tokens, 2)
                    part.copy_(words.roll(1, 2).reshape(part.shape))
                elif region.rows:
                    digits = part.reshape(part.shape[0], -1, layout.tokens, region.row_bytes)
                    part.copy_(digits.roll(1, 2).reshape(part.shape))
            page.copy_(rows)

    def factors_of_rank(self) -> list[list[Any]]:
        """Return the tensors of `Factors` for each layer, as lists [kv_heads of this rank, D]."""
        found = [layer.impl.factors(layer) for layer in our_layers(self.vllm_config).values()]
        return [[getattr(one, field.name).tolist() for field in fields(one)] for one in found]
