"""Judge the load of a service from a window of metrics: the limiting resource, latency objectives and surges."""
