"""Attention over our pages inside vLLM: backends on CPU and CUDA, for keys and values and for latents."""
