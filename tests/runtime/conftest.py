"""No hub here: its client is to say so at once. And one thread, as the engines under test have: see tests/kernels."""

import os

import torch

from kvpilot_runtime import compat

# scripts/engine_matrix.sh runs older versions, which lack what these import.
collect_ignore = ["test_extra_args_vllm.py", "test_recent_attach.py"] if compat.vllm_version() < (0, 30) else []

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)
