"""Modules that write to the cluster, and so make it match a Decision."""
