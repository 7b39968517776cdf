"""The conditions of a service: Ready sums them up; tools wait for Reconciling and Stalled."""
