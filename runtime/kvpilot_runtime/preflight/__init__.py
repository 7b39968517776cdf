"""Whether an engine can start as asked, decided before vLLM or a GPU is touched."""
