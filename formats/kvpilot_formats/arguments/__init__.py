"""Parser of `vllm serve` and `kvpilot-serve` arguments that does not import vLLM, and kvpilot's rules about them.

`parser` reads arguments as vLLM's own argparse parser does. `vllm.json` lists the options of that parser, and is
written by scripts/vllm_arguments.py. `drafts` and `rules` list options and variables that kvpilot reserves, or that do
not work with its features. The operator applies these rules to spec.engine.extraArgs, kvpilot-serve to its command
line, and an engine to its configuration.
"""

from kvpilot_formats.arguments.parser import KVPILOT, Arguments, Given, names, read, whole_number

__all__ = ["KVPILOT", "Arguments", "Given", "names", "read", "whole_number"]
