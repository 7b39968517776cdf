"""`kvpilot plan`: what would a model cost on which GPUs, and how many tokens fit?"""
