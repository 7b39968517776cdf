"""Decode kernels: attention from the tokens of an engine step to packed pages."""
