"""The cheap engine in a limited address space. With k4v4, a prompt takes memory in proportion to its squared length.

    python hungry_engine.py FAULTY_PROGRAM ENGINE_OPTIONS

It simulates an engine whose attention buffers fit every usual prompt but not a full context. Like vLLM, it ends when an
allocation fails. HUNGRY_LIMIT_MIB is its limit. It writes the length of the fatal prompt into the file
HUNGRY_LAST_WORDS.
"""

import asyncio
import importlib.util
import os
import resource
import sys
from pathlib import Path
from typing import Any

DTYPE = "k4v4"
BYTES = 16
"""Bytes that a prompt takes for each pair of its tokens."""


def taken(tokens: int) -> bytearray:
    """Allocate and return the memory that a prompt of `tokens` tokens takes. End the process if too little is left."""
    try:
        return bytearray(BYTES * tokens * tokens)
    except MemoryError:
        Path(os.environ["HUNGRY_LAST_WORDS"]).write_text(f"no memory for {tokens} tokens")
        os._exit(1)


def main(program: str) -> None:
    """Serve like the cheap engine in the file `program`, but within the memory limit."""
    about = importlib.util.spec_from_file_location("faulty", program)
    assert about is not None
    assert about.loader is not None
    sys.modules["faulty"] = faulty = importlib.util.module_from_spec(about)
    about.loader.exec_module(faulty)

    class Hungry(faulty.Engine):  # type: ignore[misc, name-defined]
        async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            buffer = taken(len(body["prompt"])) if self._dtype == DTYPE else None
            await super()._complete(body, writer)
            del buffer

    faulty.Engine = Hungry  # type: ignore[attr-defined]
    limit = int(os.environ["HUNGRY_LIMIT_MIB"]) * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    asyncio.run(faulty.main())


if __name__ == "__main__":
    main(sys.argv.pop(1))
