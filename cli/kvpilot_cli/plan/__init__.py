"""`kvpilot plan`: compute how many tokens fit on a GPU, and how many GPUs a load needs."""
