"""Accuracy probes: measure how far a quantized KV cache changes a model's answers to known prompts.

- `packs` loads the prompts, and `client` sends them to an engine.
- `run` captures a 16-bit baseline, and measures a candidate against it by teacher-forced decode.
- `stats` computes the damage from two answers, and `codec` stores a baseline as bytes.

The operator's package `decide` turns the damage into a verdict.
"""
