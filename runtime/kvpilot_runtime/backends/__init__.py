"""Attention backends for our KV-cache dtypes, which vLLM loads: on CPU and CUDA, for keys and values or MLA latents."""
