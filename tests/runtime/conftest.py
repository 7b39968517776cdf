"""No hub here: its client is to say so at once. And one thread, as the engines under test have: see tests/kernels."""

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)
