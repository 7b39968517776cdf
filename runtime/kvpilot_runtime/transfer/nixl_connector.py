"""Move our pages between engines by NIXL: vLLM's `NixlConnector`, which pulls blocks, with three additional checks.

- Engines with different terms (`terms.Terms`) refuse each other in vLLM's own handshake.
- Blocks are pulled only if the other engine has exactly the blocks of the prompt. Residual pages are not pulled.
- Received blocks are used only if they arrived before the other engine was free to reuse them.

If a check fails, this engine computes the prompt itself.
"""

import time
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.logger import init_logger

from kvpilot_runtime.transfer.terms import Terms, short

log = init_logger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers

_CLOCKS = 0.5
"""Assumed error of our estimate of another machine's clock, in seconds: half a round trip, and a margin."""


class Scheduling(NixlPullConnectorScheduler):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """Scheduler side of the connector. It decides which blocks to pull."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens to pull from another engine; 0 if it does not have all blocks of the prompt."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            groups = self.kv_cache_config.transfer_groups
            wanted = [-(-request.num_prompt_tokens // group.kv_cache_spec.block_size) for group in groups]
            missing = short(params, request.num_prompt_tokens, wanted)
            if missing is not None:
                log.warning("Request %s: computed here, because engine %s announces %s", request.request_id,
                            params.get("remote_engine_id"), missing)  # fmt: skip
                return 0, False
        found: tuple[int, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Return vLLM's parameters for the other engine. Add the time, by our clock, at which our blocks expire."""
        kept, params = super().request_finished(request, block_ids)
        if kept and params is not None:
            params["remote_blocks_expiry_time"] = self._reqs_need_send[request.request_id]
        return kept, params


class Reading(NixlPullConnectorWorker):  # type: ignore[misc]
    """Worker side of the connector. It pulls blocks, and rejects blocks that arrived after they had expired."""

    compat_hash: str
    xfer_handshake_metadata: Any

    def agree(self, terms: Terms) -> None:
        """Refuse engines whose `Terms` differ. Call this once the pages are registered, before the first handshake."""
        self.compat_hash = f"{self.compat_hash} ({terms})"
        self.xfer_handshake_metadata = replace(self.xfer_handshake_metadata, compatibility_hash=self.compat_hash)

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        if meta.remote.engine_id in self._engine_clock_offset and any(meta.local_block_ids) and self._lapsed(meta):
            self._tell_of_lapsed(req_id, meta)
            self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)
            return
        super()._read_blocks_for_req(req_id, meta)

    def _apply_prefix_caching(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], list[list[int]]]:
        """Return vLLM's pairs of blocks in ascending order, so that NIXL merges adjacent blocks into one copy."""
        local, remote = super()._apply_prefix_caching(*args, **kwargs)
        pairs = [sorted(zip(*groups, strict=True)) for groups in zip(local, remote, strict=True)]
        return [[here for here, _ in group] for group in pairs], [[away for _, away in group] for group in pairs]

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        for req_id in done - failed:
            meta = self._recving_metadata.get(req_id)
            if meta is not None and any(meta.local_block_ids) and self._lapsed(meta):
                self._tell_of_lapsed(req_id, meta)
                failed.add(req_id)
        return done, failed

    def _lapsed(self, meta: Any) -> bool:
        offset = self._engine_clock_offset[meta.remote.engine_id]
        return bool(time.perf_counter() + _CLOCKS >= meta.remote.blocks_expiry_time - offset)

    def _tell_of_lapsed(self, req_id: str, meta: Any) -> None:
        self.xfer_stats.record_kv_expired_req()
        log.warning("Request %s: computed here, because engine %s may have reused its blocks (kv_lease_duration)",
                    req_id, meta.remote.engine_id)  # fmt: skip


class PackedNixlConnector(NixlPullConnector):  # type: ignore[misc]
    """Replacement of `NixlConnector` in engines with our dtypes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = Scheduling(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = Reading(vllm_config, self.engine_id, kv_cache_config)

    def agree(self, terms: Terms, worker: Any) -> None:
        """Pass the engine's `Terms` to the connector's part in the worker."""
        self.connector_worker.agree(terms)
