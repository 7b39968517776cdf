"""What an engine's own /metrics say beside vLLM's."""
