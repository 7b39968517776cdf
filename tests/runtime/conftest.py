"""Settings of the runtime tests: one thread, and offline mode, in which the Hugging Face client fails at once."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a test's dtype from the environment, so that processes of later tests do not inherit it."""
    for variable in ("KVPILOT_DTYPE", "KVPILOT_SERVE"):
        monkeypatch.setenv(variable, "")  # monkeypatch restores it afterwards
        monkeypatch.delenv(variable)
