"""The thin edge to the Kubernetes API, through which observe reads, act writes and control elects its leader."""
