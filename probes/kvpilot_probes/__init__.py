"""Accuracy probes: measure how far a quantized KV cache changes a model's answers to known prompts.

- `packs` loads the prompts, `generated` makes those that depend on the engine, and `client` sends them.
- `images` draws images, and `chats` sends the prompts that have one.
- `run` captures a 16-bit baseline, and measures a candidate against it by teacher-forced decode.
- `reread` lets an engine read its own long answers as prompts, and compares both passes. `pace` makes room for users.
- `stats` computes the damage from two answers, and `codec` stores a baseline as bytes.
- `tasks` lets an engine solve tasks, and `results` compares how many tasks two engines have solved.
- `sequential` tests the damage in each bucket of prompts.
- `loaded` judges pages that the engine has loaded through its KV connector.
- `pressure` fills a canary's context and its KV cache.

The operator's package `decide` combines the tests into a verdict.
"""
