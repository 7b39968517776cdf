"""LMCache's `LMCacheMPConnector` for pages of ours: the same cache server, under a name that tells what pages mean.

LMCache files chunks under the model's name and their tokens. Behind that name stands here a hash of the engine's terms
and weights, so that an engine with others finds none of them. Rings stay: a request begins with an empty one, as after
any prefix hit. The engine copies its pages itself and sends them in one message, so that what an engine leaves behind
that dies is a chunk or none.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.v1.multiprocess.transfer_context.pickle import EngineDrivenContextPickle
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.logger import init_logger

from kvpilot_runtime.errors import UnsupportedEngineError
from kvpilot_runtime.recent.ring_spec import RingSpec
from kvpilot_runtime.transfer.terms import Terms
from kvpilot_runtime.transfer.weights import weights_hash

log = init_logger(f"vllm.{__name__}")  # vLLM shows what its own loggers say


def name_of(model: str, terms: Terms, weights: str) -> str:
    """The name that LMCache files an engine's pages under.

    The recent window is no part of it: rings are not filed, and a page means the same whatever window it was made with.
    """
    parts = (terms.dtype, terms.page, terms.block, terms.ranks, terms.factors, weights)
    return f"{model}##kvpilot-{hashlib.sha256('|'.join(map(str, parts)).encode()).hexdigest()[:16]}"


@dataclass
class Named(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM has no types for us
    """What a worker tells its scheduler, which looks chunks up: the name that they are filed under."""

    name: str


class PackedLMCacheConnector(LMCacheMPConnector):  # type: ignore[misc]
    """What an engine with a dtype of ours has for an `LMCacheMPConnector`."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep the pages until the engine's terms are known. Rings are left out: LMCache would copy them with pages."""
        groups = self._kv_cache_config.kv_cache_groups
        rings = {name for g in groups if isinstance(g.kv_cache_spec, RingSpec) for name in g.layer_names}
        self._pages = {name: cache for name, cache in kv_caches.items() if name not in rings}

    def agree(self, terms: Terms, worker: Any) -> None:
        """Tell LMCache of the pages, under a name of these terms and the worker's weights. Every rank has to.

        Raises:
            UnsupportedEngineError: LMCache's server shares memory with engines.
        """
        adapter, weights = self.worker_adapter, weights_hash(worker)
        adapter.model_name = name_of(adapter.model_name, terms, weights)
        send = adapter._send_register_kv_caches_request

        def send_and_look(*args: Any, **kwargs: Any) -> None:  # LMCache asks again for a server that comes back
            send(*args, **kwargs)
            if not isinstance(adapter.transfer_ctx.engine_driven_context, EngineDrivenContextPickle):
                raise UnsupportedEngineError(
                    f"LMCache's server was started with --shm-name, which does not go with kv-cache dtype "
                    f"{terms.dtype!r}: an engine that dies while it stores leaves half a chunk that counts as whole; "
                    "start the server without it"
                )

        adapter._send_register_kv_caches_request = send_and_look
        super().register_kv_caches(self._pages)
        log.info("LMCache files pages under %s (%s, weights %s)", adapter.model_name, terms, weights)

    def get_handshake_metadata(self) -> Named:
        """The name, for the scheduler."""
        return Named(self.worker_adapter.model_name)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Look chunks up under the workers' name."""
        (name,) = {told.name for told in metadata.values()}
        self.scheduler_adapter.model_name = name

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """As LMCache's, whose copies have ended where it takes its server for dead and gives their blocks away."""
        adapter = self.worker_adapter
        if not adapter.is_healthy:
            adapter.transfer_ctx.flush_inflight_stores()
        found: tuple[set[str] | None, set[str] | None] = super().get_finished(finished_req_ids)
        return found
