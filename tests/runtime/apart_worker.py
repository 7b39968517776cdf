"""Methods for the workers of engines that exchange pages (vLLM's `worker_extension_cls`)."""

import hashlib
from typing import Any

from kvpilot_runtime.backends.packed import our_layers
from support.residual_worker import ResidualWorker


class ApartWorker(ResidualWorker):
    """Methods that vLLM adds to each of its workers."""

    def digests(self, blocks: list[int]) -> list[str]:
        """Return the hash of each block's bytes in all layers of this rank."""
        caches = [layer.kv_cache for layer in our_layers(self.vllm_config).values()]
        whole = (b"".join(cache[block].numpy().tobytes() for cache in caches) for block in blocks)
        return [hashlib.sha256(one).hexdigest() for one in whole]

    def watch_reads(self) -> None:
        """Record the content of blocks that a transfer filled, before any step uses them."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().connector_worker
        self.read: list[tuple[str, list[Any]]] = []
        pop, wrapper = worker._pop_done_transfers, worker.nixl_wrapper
        stock, weigh = wrapper.check_xfer_state, wrapper.get_xfer_telemetry
        self.blind, self.copied = False, 0

        def popped(transfers: Any) -> Any:
            done, failed = pop(transfers)
            for request in done - failed - worker._recv_failures:
                groups = worker._recving_metadata[request].local_block_ids
                self.read.append((request, [[list(group), self.digests(list(group))] for group in groups]))
            return done, failed

        def looked(handle: Any) -> str:
            found = str(stock(handle))
            return "PROC" if self.blind and found == "DONE" else found

        def weighed(handle: Any) -> Any:
            found = weigh(handle)
            self.copied += found.descCount
            return found

        worker._pop_done_transfers, wrapper.check_xfer_state, wrapper.get_xfer_telemetry = popped, looked, weighed

    def copies(self) -> int:
        """Return the number of copies of all reads."""
        return self.copied

    def reads(self) -> list[tuple[str, list[Any]]]:
        """Return, for each request read since the last call, its id, its blocks and their digests by group."""
        read, self.read = self.read, []
        return read

    def look_away(self, blind: bool) -> None:
        """Ignore the end of reads while `blind`."""
        self.blind = blind
