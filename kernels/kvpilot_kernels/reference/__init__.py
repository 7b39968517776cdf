"""Codecs in plain torch: the reference of the kernels' tests, and the implementation on a CPU."""
