"""Probes: when one is due, what it is measured against, what its result means."""
