"""Make the cluster match a Decision: the modules that write to it."""
