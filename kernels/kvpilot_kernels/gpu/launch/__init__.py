"""Launches: the interface for backends, and launch parameters."""
