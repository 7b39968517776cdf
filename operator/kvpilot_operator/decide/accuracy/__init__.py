"""Accuracy: the baseline, the verdict of a probe, and drift."""
