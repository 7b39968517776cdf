"""The thin edge to the Kubernetes API, shared by observe (reads) and act (writes)."""
