"""`kvpilot probe`: the operator's accuracy gate for two endpoints that somebody else runs, without a cluster."""
