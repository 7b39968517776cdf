"""Measurements by subject, run from a checkout: `python -m benchmarks.kernels.decode`."""
