"""Kernels of multi-head latent attention (MLA)."""
