"""Kill the operator with SIGKILL after each new kind of write."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

from support.faulty_world import FaultyWorld


class Killer:
    """Task that repeatedly kills the operator. `killed` lists the writes after which it killed the operator.

    An entry has the method, the path below the namespace, and the canary's stage, verdict and traffic step. Only writes
    for the service `name` that satisfy `worth` count, because a restart of the operator takes seconds, and other
    services have no trial.
    """

    def __init__(self, world: FaultyWorld, name: str, worth: Callable[[str], bool]) -> None:
        self._world, self._name, self._worth = world, name, worth
        self._stage = ""
        self.killed: list[str] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, world: FaultyWorld, name: str, worth: Callable[[str], bool]) -> "AsyncIterator[Killer]":
        """Kill and restart the operator after each write for `name` that satisfies `worth`, until the block ends."""
        killer = cls(world, name, worth)
        world.api.on_write = killer._written
        starts = asyncio.create_task(killer._start_again())
        try:
            yield killer
        finally:
            world.api.on_write = lambda *_: None
            starts.cancel()
            await asyncio.gather(starts, return_exceptions=True)
            if not world.operator_runs:
                await world.start_operator()

    def _written(self, method: str, path: str, body: bytes) -> None:
        below = path.partition("/namespaces/")[2].partition("/")[2]
        kind, _, rest = below.partition("/")
        if kind in ("", "events"):
            return
        name = rest.partition("/")[0] or json.loads(body)["metadata"]["name"]
        if name != self._name and not name.startswith(f"{self._name}-"):
            return
        if kind == "quantizedllmservices":
            canary = (json.loads(body).get("status") or {}).get("canary") or {}
            self._stage = " ".join(str(canary.get(part, "")) for part in ("stage", "verdict", "step"))
        what = f"{method} {below} {self._stage}".strip()
        if what not in self.killed and self._worth(what):
            self.killed.append(what)
            self._world.kill_operator()

    async def _start_again(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            if not self._world.operator_runs:
                self._world.launch_operator()
