"""The kvpilot operator: it decides which KV-cache dtype and how many replicas a service runs with."""
