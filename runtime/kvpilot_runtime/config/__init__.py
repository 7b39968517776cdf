"""What is asked of an engine, and what of it goes with our dtypes: read without vLLM, and told to those who have it."""
