"""`kubectl kvpilot`: read QuantizedLLMServices, and change the course of their canaries."""
