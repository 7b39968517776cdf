"""Engine like `apart_engine` that shares pages through LMCache. Its steps include the copies to and from LMCache."""

from typing import Any

import apart_engine


class SharedEngine(apart_engine.Engine):
    """Engine that, after each step, records the blocks that each rank has stored in LMCache or loaded from it."""

    extension = "shared_worker.SharedWorker"

    def start(self, model: str, options: dict[str, Any]) -> dict[str, Any]:
        """Create the engine.

        vLLM 0.32's CPU platform searches all modules for kernels, and crashes on a module of numba, which LMCache
        imports. A fake attribute of that module prevents the crash.
        """
        import llvmlite.binding.ffi

        llvmlite.binding.ffi.lib._fntab["__dict__"] = {}
        self.rings: dict[str, list[int]] = {}
        self.poisoned = 0
        return super().start(model, options)

    def take_down(self, scheduled: Any) -> None:
        """Record a step's requests. Also fill the rings that they get with other rows or random bytes.

        Otherwise a restarted request could find its own rows there.
        """
        super().take_down(scheduled)
        cached = scheduled.scheduled_cached_reqs
        given = {request.req_id: request.block_ids for request in scheduled.scheduled_new_reqs}
        given |= dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
        for request in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            self.rings.pop(request, None)
        for request, groups in given.items():
            for block in groups[1] if groups is not None and len(groups) > 1 else ():
                others = [b for owner, owned in self.rings.items() if owner != request for b in owned]
                self.poisoned += 1
                other = others[self.poisoned % len(others)] if others else None
                self.workers("poison_ring", block, other, self.poisoned)
                self.rings.setdefault(request, []).append(block)

    def executed(self) -> None:
        """Record the blocks that each rank has stored or loaded since the last step."""
        ranks = self.workers("moved")
        self.steps += [{"moved": list(one)} for one in zip(*ranks, strict=True)]


def main() -> None:
    """Answer questions until the other side closes the connection."""
    apart_engine.answer(SharedEngine())


if __name__ == "__main__":
    main()
