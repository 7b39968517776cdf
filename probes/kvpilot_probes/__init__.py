"""Accuracy probes: teacher-forced decode of known prompts, and the damage that a candidate's KV cache does to them.

`packs` holds the prompts, and `client` asks an engine. `run` captures a 16-bit baseline and measures a candidate
against it. `stats` turns two answers into damage, `codec` keeps a baseline as bytes. The verdict is made in `decide`.
"""
