"""A thin layer over the Kubernetes API. observe reads through it, act writes, and control elects the leader."""
