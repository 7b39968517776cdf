"""KV-cache formats, vLLM's arguments and models' config.json. Pure Python; it imports no other package of kvpilot."""
