"""Demo of the README: a service is promoted to a smaller KV cache, on this machine, with real components."""
