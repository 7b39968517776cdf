"""Multi-head latent attention (MLA) on a CPU: packed pages with one latent per token."""
