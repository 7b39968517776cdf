"""An engine that drains finishes all requests that it has received, even those that wait for the end of a step."""

import queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from kvpilot_runtime import plugin


class Core(EngineCoreProc):
    """vLLM's loop around an engine. This engine only records its input."""

    def __init__(self, timeout: int) -> None:
        self.vllm_config: Any = SimpleNamespace(shutdown_timeout=timeout)
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.shutdown_state = EngineShutdownState.RUNNING
        self.engines_running, self.batch_queue = False, None
        self.taken: list[str] = []
        self.handed_back: list[str] = []
        self.scheduler: Any = SimpleNamespace(
            has_requests=lambda: bool(self.taken),
            get_num_unfinished_requests=lambda: len(self.taken),
            finish_requests=lambda *_: [],
        )

    def send(self, name: str) -> None:
        self.input_queue.put((EngineCoreRequestType.ADD, (SimpleNamespace(request_id=name, client_index=0), 0)))

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        self.taken.append(request.request_id)

    def _send_abort_outputs_to_client(self, request_ids: list[str], client_index: int) -> None:
        self.handed_back += request_ids

    def _send_abort_outputs(self, aborted: Any) -> None:
        assert not aborted


@pytest.fixture(autouse=True)
def _hooked() -> None:
    plugin.serve_requests()


def test_a_draining_engine_accepts_requests_already_queued_and_rejects_later_ones() -> None:
    core = Core(timeout=60)
    core.send("waits")
    core.shutdown_state = EngineShutdownState.REQUESTED  # The signal handler does the same in the middle of a step.
    core.input_queue.put((EngineCoreRequestType.WAKEUP, None))
    assert core._handle_shutdown(), "there is work left"
    assert core.taken == ["waits"]
    core.send("late")
    core._process_input_queue()
    assert (core.taken, core.handed_back) == (["waits"], ["late"])
    core.taken.clear()
    assert not core._handle_shutdown()


def test_a_request_between_the_signal_and_the_engines_check_is_accepted() -> None:
    core = Core(timeout=60)
    assert core._handle_shutdown()
    core.shutdown_state = EngineShutdownState.REQUESTED
    core.send("between")
    core._process_input_queue()
    assert (core.taken, core.handed_back) == (["between"], [])


def test_an_engine_without_a_drain_time_accepts_no_queued_request() -> None:
    core = Core(timeout=0)
    core.send("waits")
    core.shutdown_state = EngineShutdownState.REQUESTED
    core._handle_shutdown()
    core._process_input_queue()
    assert (core.taken, core.handed_back) == ([], ["waits"])
