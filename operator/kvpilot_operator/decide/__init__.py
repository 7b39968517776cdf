"""Pure decisions: Snapshot in, Decision out. No clock, no I/O, no randomness; one file per question."""

from kvpilot_operator.decide.accuracy.baseline import described
from kvpilot_operator.decide.accuracy.verdict import Judgement, allowed, control_fault, judge
from kvpilot_operator.decide.decide import decide
from kvpilot_operator.decide.rejections import refused
from kvpilot_operator.decide.rollout.shifting import deadline as canary_deadline

__all__ = ["Judgement", "allowed", "canary_deadline", "control_fault", "decide", "described", "judge", "refused"]
