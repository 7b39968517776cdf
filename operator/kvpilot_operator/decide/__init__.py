"""Pure decisions: Snapshot in, Decision out. No clock, no I/O, no randomness; one file per question."""

from kvpilot_operator.decide.decide import decide

__all__ = ["decide"]
