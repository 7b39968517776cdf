"""Setting of the runtime's tests: no hub, so its client fails at once, and one thread (see tests/kernels)."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test's dtype reach the processes that a later test starts."""
    for variable in ("KVPILOT_DTYPE", "KVPILOT_SERVE"):
        monkeypatch.setenv(variable, "")  # to restore it afterwards
        monkeypatch.delenv(variable)
