"""Modules that read from the cluster, and gather everything known about a service into a Snapshot."""
