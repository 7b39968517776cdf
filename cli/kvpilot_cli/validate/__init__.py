"""`kvpilot validate`: judge QuantizedLLMServices without a cluster."""
