"""`kvpilot probe`: run the operator's accuracy gate on any two endpoints, without a cluster."""
