"""Runs the operator: watches fill a work queue, which reconciles services, and a loop scrapes the fleet."""
