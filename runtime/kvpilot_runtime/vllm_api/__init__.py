"""vLLM as kvpilot uses it: supported versions, required parts, and replaced functions."""
