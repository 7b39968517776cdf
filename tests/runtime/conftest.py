"""Settings of the runtime tests: offline mode, so that the Hugging Face client fails at once, and one thread."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a test's requested dtype from the environment, so that processes of later tests do not inherit it."""
    for variable in ("KVPILOT_DTYPE", "KVPILOT_SERVE"):
        monkeypatch.setenv(variable, "")  # monkeypatch restores it afterwards
        monkeypatch.delenv(variable)
