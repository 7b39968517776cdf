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
        return super().start(model, options)

    def executed(self) -> None:
        """Record the blocks that each rank has stored or loaded since the last step."""
        ranks = self.workers("moved")
        self.steps += [{"moved": list(one)} for one in zip(*ranks, strict=True)]


def main() -> None:
    """Answer questions until the other side closes the connection."""
    apart_engine.answer(SharedEngine())


if __name__ == "__main__":
    main()
