"""Runs the operator: watches ask for passes, a loop scrapes the fleet, a queue keeps one pass a service at a time."""
