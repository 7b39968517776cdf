"""The load: what binds a service, and how surely."""
