"""Metrics of an engine beside vLLM's."""
