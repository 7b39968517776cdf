"""`kvpilot plan`: the cost of a model on GPUs, and the tokens that fit."""
