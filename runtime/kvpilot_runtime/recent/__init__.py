"""Recent window inside vLLM: ring layers, which hold each layer's ring of residuals, and their KV-cache specs."""
