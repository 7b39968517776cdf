"""Bounded caches: pages that vLLM's scheduler frees, and attention over the pages that are kept."""
