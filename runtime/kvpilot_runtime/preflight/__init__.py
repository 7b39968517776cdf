"""Checks of a request to start an engine, before vLLM is imported or a GPU is used."""
