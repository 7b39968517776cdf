"""Decide on accuracy: the baseline, the verdict on a probe's result, and drift of the serving dtype."""
