"""vLLM attention backends for our KV-cache dtypes: on CPU and CUDA, for keys and values or for MLA latents."""
