"""Arguments of `vllm serve` and `kvpilot-serve`, read without vLLM: one parser, and one table of kvpilot's rules.

`parser` reads arguments as vLLM's own argparse parser does; `vllm.json` is the table of that parser's options, written
by scripts/vllm_arguments.py. `drafts`, `transfer` and `rules` say which options and variables do not go together. The
operator judges spec.engine.extraArgs by them, kvpilot-serve judges its command line, and an engine its configuration.
"""

from kvpilot_formats.arguments.numbers import whole_number
from kvpilot_formats.arguments.parser import KVPILOT, Arguments, Given, names, read

__all__ = ["KVPILOT", "Arguments", "Given", "names", "read", "whole_number"]
