"""KV-cache formats, vLLM's arguments and models' config.json, in pure Python; imports no other package of ours."""
