"""Arguments of `vllm serve` and `kvpilot-serve`, read without vLLM: one parser, and one table of kvpilot's rules.

`parser` reads arguments as vLLM's own argparse parser; `vllm.json` is the table of that parser's options, written by
scripts/vllm_arguments.py. `drafts` and `rules` say which options and variables are not supported together. The operator
applies them to spec.engine.extraArgs, kvpilot-serve to its command line, and an engine to its configuration.
"""

from kvpilot_formats.arguments.numbers import whole_number
from kvpilot_formats.arguments.parser import KVPILOT, Arguments, Given, names, read

__all__ = ["KVPILOT", "Arguments", "Given", "names", "read", "whole_number"]
