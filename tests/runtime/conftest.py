"""No hub here: its client is to say so at once. And one thread, as the engines under test have: see tests/kernels."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test's dtype reach the processes that a later test starts."""
    for variable in ("KVPILOT_DTYPE", "KVPILOT_SERVE"):
        monkeypatch.setenv(variable, "")  # so that it is as before afterwards
        monkeypatch.delenv(variable)
