"""Store: write a step's keys, values and queries."""
