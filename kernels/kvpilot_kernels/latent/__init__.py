"""Multi-head latent attention (MLA): the cache of one latent a token in packed pages."""
