"""`kubectl kvpilot`: read QuantizedLLMServices, and pause, resume or undeny them."""
