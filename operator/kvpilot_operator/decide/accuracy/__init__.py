"""Probes: when one is due, and what its result means."""
