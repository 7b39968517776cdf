"""The recent window in an engine: ring layers beside ours, and what vLLM's scheduler knows of their pages."""
