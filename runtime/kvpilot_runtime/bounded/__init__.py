"""Bounded caches (`--retention`): vLLM's scheduler frees pages of a sequence, and attention reads the kept pages."""
