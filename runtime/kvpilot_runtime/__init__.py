"""The kvpilot runtime: a vLLM plugin with quantized KV caches, and `kvpilot-serve`, the image's entry point."""
