"""Gather everything known about one service into a Snapshot: the modules that read from the cluster."""
