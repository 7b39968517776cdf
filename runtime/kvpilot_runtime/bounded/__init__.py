"""Caches with a bound: what vLLM's scheduler frees, and attention over the pages that are kept."""
