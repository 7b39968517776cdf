"""Demo of the README: one service earns its smaller KV cache, on this machine, with real components."""
