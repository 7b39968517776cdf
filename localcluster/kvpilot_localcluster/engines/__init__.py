"""Engines for the demo, benchmarks and tests: a real vLLM, an engine with faults, and recorded metrics pages."""

from pathlib import Path

PAGE_EARLY = Path(__file__).with_name("vllm-0.32.0-early.txt")
"""Metrics page of vLLM 0.32.0 soon after its start."""
PAGE_LATER = Path(__file__).with_name("vllm-0.32.0-later.txt")
"""Metrics page of the same engine after some load."""
