"""A rollout: the stages of a trial, its probes, its comparison and its end."""
