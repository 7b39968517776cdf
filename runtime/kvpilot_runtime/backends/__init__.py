"""Attention backends for kvpilot's KV-cache dtypes ("our dtypes" in this package), which vLLM loads.

There is one for each platform (CPU, CUDA) and content of pages (keys and values, or MLA latents).
"""
