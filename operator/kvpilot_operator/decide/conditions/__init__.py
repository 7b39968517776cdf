"""The conditions of a service: Ready sums them up; tools wait for Reconciling and Stalled."""

from kvpilot_operator.decide.conditions.tell import leave, refuse, tell

__all__ = ["leave", "refuse", "tell"]
