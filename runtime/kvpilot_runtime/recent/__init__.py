"""Recent window inside vLLM: residual pages in the scheduler's pool, and the map with which workers find them."""
