"""The conditions of a service: Ready sums them up, Reconciling and Stalled are what tools wait for."""

from kvpilot_operator.decide.conditions.tell import leave, refuse, tell

__all__ = ["leave", "refuse", "tell"]
