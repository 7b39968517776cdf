"""Accuracy probes: teacher-forced decode of known prompts, and the damage that a candidate's KV cache does to them.

`packs` says what is asked, `client` asks an engine, `run` captures a 16-bit baseline and measures a candidate against
it, `stats` turns two answers into damage, `codec` keeps a baseline as bytes. Whether the damage is too much is decided
elsewhere (`decide.verdict`).
"""
