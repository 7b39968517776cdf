"""Recent window inside vLLM: the ring layers, which store rings of residuals, and their KV-cache specs."""
