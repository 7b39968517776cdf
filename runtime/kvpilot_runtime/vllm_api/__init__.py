"""Interface to vLLM: supported versions, required parts, and replaced functions."""
