"""Attention over our pages inside vLLM: a backend for CPU and one for CUDA, each for keys and values or latents."""
