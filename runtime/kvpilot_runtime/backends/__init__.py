"""Attention over our pages inside vLLM: one backend for each of CPU and CUDA, of keys and values and of latents."""
