"""Multi-head latent attention (MLA): a cache of one latent per token in packed pages."""
