"""Names and sizes of KV-cache formats, parsers of vLLM's arguments and of config.json. It needs no other package."""
