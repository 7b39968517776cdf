"""The load of a service: its pressure, latencies and surges, read from a window of metrics."""
