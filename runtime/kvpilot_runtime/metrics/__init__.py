"""Metrics that kvpilot adds to those of vLLM."""
