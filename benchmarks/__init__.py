"""Benchmarks by subject. Run them from a checkout: `python -m benchmarks.kernels.decode`."""
