"""`kvpilot probe`: compare the accuracy of any two endpoints as the operator would, without a cluster."""
