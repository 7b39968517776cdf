"""Store kernels: write a step's keys, values and queries."""
