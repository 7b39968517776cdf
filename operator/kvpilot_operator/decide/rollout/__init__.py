"""Advance a rollout: the stages of a trial, its probes, its traffic steps and its end."""
