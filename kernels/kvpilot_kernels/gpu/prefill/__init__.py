"""Prefill: read pages back in 16 bits, and attend with heads of 512 elements."""
