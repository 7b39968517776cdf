"""Weigh the steps that the pilot could take (another dtype, other replicas): their gains, costs and the choice."""
