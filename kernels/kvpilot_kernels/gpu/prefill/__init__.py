"""Prefill kernels: read pages back in 16 bits, and compute attention for heads of 512 elements."""
