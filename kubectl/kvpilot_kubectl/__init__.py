"""`kubectl kvpilot`: what a person asks of their services, and the few things that they tell them."""
