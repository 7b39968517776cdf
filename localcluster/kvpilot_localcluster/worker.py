"""Run one container of a pod: start it, run its probes, and restart it by its restart policy."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpilot_localcluster.backoff import Backoff
from kvpilot_localcluster.container import Command, Process
from kvpilot_localcluster.errors import InvalidPod, UnknownImage
from kvpilot_localcluster.podstatus import ContainerView, Run
from kvpilot_localcluster.probes import Target, act, probe
from kvpilot_localcluster.tasks import cancelled

# If a preStop hook used up the grace period, give the process this many more seconds, as a kubelet does.
_LEAST_GRACE = 2.0


def restarts(policy: str, exit_code: int) -> bool:
    """Return True if a container that ended with this exit code must restart."""
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


class ContainerWorker:
    """Runner of one container.

    The folder has a record of each run, so a new worker continues where a killed one stopped.

    Attributes:
        view: the container's state for the pod's status.

    Args:
        spec: the container in the pod's spec.
        init: True for an init container.
        policy: restart policy: Always, OnFailure or Never.
        address: the pod's IP address.
        folder: folder for the records of runs.
        logs: folder for the logs of runs.
        backoff: waits before restarts.
        command: function that returns the command of a container, given its spec and its termination message file.
        changed: callback after each change of `view`.
        before: ContainerStatus that an earlier agent reported; empty if there is none.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        init: bool,
        policy: str,
        address: str,
        folder: Path,
        logs: Path,
        backoff: Backoff,
        command: Callable[[Mapping[str, Any], Path], Awaitable[Command]],
        changed: Callable[[], None],
        before: Mapping[str, Any],
    ) -> None:
        self._spec = spec
        self._init = init
        self._policy = policy
        self._address = address
        self._folder = folder
        self._logs = logs
        self._backoff = backoff
        self._command = command
        self._changed = changed
        self.grace = 30.0
        self.view = ContainerView(spec["name"], spec["image"])
        self._adopt(before)

    def _processes(self) -> list[Process]:
        numbers = sorted(int(entry.name) for entry in self._folder.glob("*") if entry.name.isdigit())
        return [self._process(number) for number in numbers]

    def _process(self, number: int) -> Process:
        policy = self._spec.get("terminationMessagePolicy", "File")
        return Process(self._folder / str(number), self._logs / f"{number}.log", policy)

    def _adopt(self, before: Mapping[str, Any]) -> None:
        """Adopt the runs of an earlier agent. If the container still runs, take its readiness from `before`."""
        self._show()
        if self.view.running:
            self.view = replace(self.view, ready=before.get("ready", False), started=before.get("started", False))
        elif self.view.succeeded and self._init:
            self.view = replace(self.view, ready=True)

    def _show(self) -> None:
        """Update `view` to the newest run, if there is one."""
        runs = [run for process in self._processes() if (run := process.run()) is not None]
        if runs and (self.view.run is None or self.view.run.identity != runs[-1].identity or self.view.waiting):
            previous = runs[-2] if len(runs) > 1 else None
            fresh = ContainerView(self.view.name, self.view.image, waiting=None)
            self.view = replace(fresh, run=runs[-1], previous=previous, restarts=len(runs) - 1)

    def _set(self, **changes: Any) -> None:
        self.view = replace(self.view, **changes)
        self._changed()

    async def work(self) -> None:
        """Run the container, and restart it until its restart policy says to stop."""
        while True:
            processes = self._processes()
            last = processes[-1] if processes else None
            if last is None or ((run := last.run()) is not None and run.finished is not None):
                if last is not None and not restarts(self._policy, (await last.wait()).exit_code):
                    return
                last = await self._start(processes)
            await last.started()
            self._show()
            self._changed()
            ended = await self._accompany(last)
            self._set(run=ended, ready=self._init and ended.exit_code == 0, started=False)

    async def _start(self, processes: list[Process]) -> Process:
        runs = [run for process in processes if (run := process.run()) is not None and run.finished is not None]
        if runs:
            wait = self._backoff.delay([(run.finished or run.started) - run.started for run in runs])
            left = (runs[-1].finished or 0.0) + wait - time.time()
            if left > 0:
                message = f"back-off {wait:g}s restarting failed container={self.view.name}"
                self._set(waiting=("CrashLoopBackOff", message))
                await asyncio.sleep(left)
        number = len(processes)
        process = self._process(number)
        while True:
            try:
                command = await self._command(self._spec, process.message_file)
            except UnknownImage as error:
                await self._no_image(str(error))
            except InvalidPod as error:
                self._set(waiting=("CreateContainerConfigError", str(error)))
                await asyncio.sleep(1)
            else:
                process.start(command)
                return process

    async def _no_image(self, message: str) -> None:
        self._set(waiting=("ErrImagePull", message))
        await asyncio.sleep(2)
        self._set(waiting=("ImagePullBackOff", message))
        # An agent reads the image table only once, at its start. So an unknown image remains unknown.
        await asyncio.Event().wait()

    def _target(self, process: Process) -> Target:
        ports = {port["name"]: port["containerPort"] for port in self._spec.get("ports") or [] if "name" in port}
        return Target(self._address, ports, process.command)

    async def _accompany(self, process: Process) -> Run:
        nurse = asyncio.create_task(self._probe(process))
        try:
            return await process.wait()
        finally:
            await cancelled(nurse)

    async def _probe(self, process: Process) -> None:
        target, spec = self._target(process), self._spec
        if "startupProbe" in spec and not self.view.started:
            passed = asyncio.Event()

            async def startup(success: bool, fault: str) -> None:
                if success:
                    passed.set()
                else:
                    await self._kill(process, f"startup probe failed: {fault}")

            trial = asyncio.create_task(probe(spec["startupProbe"], target, startup, initially=None))
            try:
                await passed.wait()
            finally:
                trial.cancel()
        ready = self.view.ready if "readinessProbe" in spec else not self._init
        self._set(started=True, ready=ready)

        async def readiness(success: bool, _: str) -> None:
            if self.view.ready != success:
                self._set(ready=success)

        async def liveness(success: bool, fault: str) -> None:
            if not success:
                await self._kill(process, f"liveness probe failed: {fault}")

        async with asyncio.TaskGroup() as group:
            if "readinessProbe" in spec:
                group.create_task(probe(spec["readinessProbe"], target, readiness, initially=ready))
            if "livenessProbe" in spec:
                group.create_task(probe(spec["livenessProbe"], target, liveness, initially=True))

    async def _kill(self, process: Process, why: str) -> None:
        with process.log.open("a") as log:
            log.write(f"[node] ended: {why}\n")
        await self.end_process(process, lambda: self.grace)

    async def end(self, grace: Callable[[], float]) -> None:
        """End the container: preStop, SIGTERM, and SIGKILL when the grace period is over.

        Args:
            grace: function that returns the remaining grace period in seconds. Call it repeatedly, because the API
                server may shorten the period.
        """
        processes = self._processes()
        if not processes or processes[-1].shim is None:
            return
        ended = await self.end_process(processes[-1], grace)
        self._set(waiting=None, run=ended, ready=False, started=False)

    async def end_process(self, process: Process, grace: Callable[[], float]) -> Run:
        """End one run of the container. This does not change the container's status (`view`)."""
        begun = time.monotonic()
        first = grace()
        hook = (self._spec.get("lifecycle") or {}).get("preStop")
        gone = asyncio.ensure_future(process.wait())

        def left() -> float:
            return min(grace(), first - (time.monotonic() - begun))

        if hook is not None:
            stopping = asyncio.ensure_future(act(hook, self._target(process)))
            while not stopping.done() and not gone.done() and left() > 0:
                await asyncio.wait({stopping, gone}, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            await cancelled(stopping)
        process.terminate()
        least = time.monotonic() + (_LEAST_GRACE if hook is not None and first > 0 else 0.0)
        while not gone.done() and (left() > 0 or time.monotonic() < least):
            await asyncio.wait({gone}, timeout=0.1)
        process.kill()
        return await gone

    async def kill(self, grace: float) -> None:
        """End all processes without hooks, because the node shuts down."""
        for process in self._processes():
            if process.shim is not None:
                await process.end(grace)
