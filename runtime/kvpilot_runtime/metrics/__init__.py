"""Metrics that kvpilot adds to vLLM's metrics."""
