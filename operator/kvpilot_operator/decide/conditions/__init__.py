"""Decide the status conditions of a QuantizedLLMService, such as Ready, Reconciling and Stalled."""
