"""Codecs in plain torch: the reference for tests of kernels, and the implementation on a CPU."""
