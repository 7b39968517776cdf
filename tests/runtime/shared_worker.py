"""Methods for the workers of engines that share pages through LMCache (vLLM's `worker_extension_cls`)."""

import hashlib
from typing import Any

from apart_worker import ApartWorker


class SharedWorker(ApartWorker):
    """Methods that vLLM adds to each of its workers."""

    def watch_reads(self) -> None:
        """Record the blocks that are sent to LMCache or come from it, with their content at that moment."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.moves: list[dict[str, Any]] = []
        self.read: list[tuple[str, list[Any]]] = []
        adapter = get_kv_transfer_group().worker_adapter
        connect = adapter._send_register_kv_caches_request

        def connect_and_watch(kv_caches: Any) -> None:
            connect(kv_caches)
            self.watch(adapter.transfer_ctx)

        adapter._send_register_kv_caches_request = connect_and_watch
        self.watch(adapter.transfer_ctx)

    def watch(self, context: Any) -> None:
        """Watch one connection to the server."""
        store, retrieve, block = context.submit_store, context.submit_retrieve, self.vllm_config.cache_config.block_size

        def move(what: str, key: Any, blocks: list[int], skipped: int = 0) -> None:
            """Record each block with its key: the hash of all tokens up to its end."""
            found = []
            for i, one in enumerate(blocks):
                end = key.start + (i + 1) * block
                if end > key.start + skipped:
                    place = hashlib.sha256(str(key.token_ids[:end]).encode()).hexdigest()
                    found.append([one, place, self.digests([one])[0]])
            self.moves.append({what: found})

        def stored(request: str, key: Any, caches: Any, blocks: Any, *more: Any) -> Any:
            done = store(request, key, caches, blocks, *more)
            if done.result():
                move("stored", key, blocks[0])
            return done

        def loaded(request: str, key: Any, caches: Any, blocks: Any, *more: Any, skip_first_n_tokens: int = 0) -> Any:
            done = retrieve(request, key, caches, blocks, *more, skip_first_n_tokens=skip_first_n_tokens)
            if done.result():
                move("loaded", key, blocks[0], skip_first_n_tokens)
            return done

        context.submit_store, context.submit_retrieve = stored, loaded

    def moved(self) -> list[dict[str, Any]]:
        """Return the records since the last call, in the order of the moves."""
        moves, self.moves = self.moves, []
        return moves
