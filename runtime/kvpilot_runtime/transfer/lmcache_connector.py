"""Store our pages in LMCache, by its `LMCacheMPConnector` with model names that identify our quantization.

LMCache finds a chunk by the model's name and the chunk's tokens. We add a hash of the engine's terms (`transfer.terms`)
and weights to the name, so that engines with other terms do not find the chunk. Residual pages are not stored, so an
engine reads tokens from LMCache with the dtype's own bits. It sends each chunk in one message, so the LMCache server
has the whole chunk or nothing if an engine dies.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.v1.multiprocess.transfer_context.pickle import EngineDrivenContextPickle
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.logger import init_logger

from kvpilot_runtime.errors import UnsupportedEngineError
from kvpilot_runtime.transfer.terms import Terms, weights_hash

log = init_logger(f"vllm.{__name__}")  # vLLM prints only messages of its own loggers


def name_of(model: str, terms: Terms, weights: str) -> str:
    """Return the model name under which LMCache stores an engine's pages.

    The name does not depend on the recent window, because pages are the same for every window.
    """
    parts = (terms.dtype, terms.page, terms.block, terms.ranks, terms.factors, weights)
    return f"{model}##kvpilot-{hashlib.sha256('|'.join(map(str, parts)).encode()).hexdigest()[:16]}"


@dataclass
class Named(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # mypy sees vLLM's classes as Any
    """Message from a worker to its scheduler: the model name under which LMCache has the engine's chunks."""

    name: str


class PackedLMCacheConnector(LMCacheMPConnector):  # type: ignore[misc]
    """Replacement of `LMCacheMPConnector` in engines with our dtypes."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep the layers' pages until `agree` registers them."""
        self._pages = kv_caches

    def agree(self, terms: Terms, worker: Any) -> None:
        """Register the pages with LMCache, under a name that contains hashes of `terms` and of the worker's weights.

        Every rank must call this.
        """
        adapter, weights = self.worker_adapter, weights_hash(worker)
        adapter.model_name = name_of(adapter.model_name, terms, weights)
        send = adapter._send_register_kv_caches_request

        def send_and_look(*args: Any, **kwargs: Any) -> None:  # LMCache calls this again when its server has restarted.
            send(*args, **kwargs)
            if not isinstance(adapter.transfer_ctx.engine_driven_context, EngineDrivenContextPickle):
                raise UnsupportedEngineError(
                    f"LMCache's server was started with --shm-name, which is not supported with kv-cache dtype "
                    f"{terms.dtype!r}: an engine that dies while it stores a chunk leaves a broken chunk that other "
                    "engines would use; start the server without it"
                )

        adapter._send_register_kv_caches_request = send_and_look
        super().register_kv_caches(self._pages)
        log.info("LMCache stores pages under %s (%s, weights %s)", adapter.model_name, terms, weights)

    def get_handshake_metadata(self) -> Named:
        """Return the name under which LMCache stores the engine's pages, for the scheduler."""
        return Named(self.worker_adapter.model_name)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Let the scheduler look up chunks under the name that the workers use."""
        (name,) = {told.name for told in metadata.values()}
        self.scheduler_adapter.model_name = name

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return LMCache's result. If LMCache's server seems dead, first wait for the copies that have begun.

        Otherwise LMCache would release blocks while it still copies them.
        """
        adapter = self.worker_adapter
        if not adapter.is_healthy:
            adapter.transfer_ctx.flush_inflight_stores()
        found: tuple[set[str] | None, set[str] | None] = super().get_finished(finished_req_ids)
        return found
