"""The conditions: what people read of a service, and what tools wait for."""
