"""Demo of the README: with real components on this machine, a service changes to a smaller KV cache."""
