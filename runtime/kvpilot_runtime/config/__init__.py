"""Settings of an engine, and the limits that our dtypes put on them, without importing vLLM."""
