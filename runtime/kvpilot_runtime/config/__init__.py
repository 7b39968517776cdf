"""Settings of an engine and their limits with our dtypes, read without vLLM."""
