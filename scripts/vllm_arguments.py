"""Write the options of the installed vLLM's `serve` command, so that kvpilot can parse arguments without vLLM.

    .venv/bin/python scripts/vllm_arguments.py formats/kvpilot_formats/arguments/vllm.json

It asks vLLM's own argparse parser, whose import takes half a minute. tests/runtime/test_arguments_vllm.py compares the
file with the installed vLLM.
"""

import json
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any


def real_parser() -> Any:
    """Return the parser of `vllm serve`."""
    flexible = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    return import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser(flexible(prog="vllm serve"))


def table(parser: Any) -> dict[str, dict[str, Any]]:
    """Return facts of each option, in the parser's order.

    - `also`: other names
    - `off`: the name that negates it
    - `takes`: number of values: "1", "0", "?" or "+"
    """
    found = {}
    for action in parser._actions:
        names = [name for name in action.option_strings if not name.startswith("--no-")]
        if not names:  # the model, which is positional
            continue
        main = next(name for name in names if name.startswith("--"))
        row: dict[str, Any] = {"takes": "1" if action.nargs is None else str(action.nargs)}
        if others := [name for name in names if name != main]:
            row["also"] = others
        if off := [name for name in action.option_strings if name.startswith("--no-")]:
            row["off"] = off[0]
        found[main] = row
    return found


def main() -> None:
    """Write the options of `vllm serve` to the file that the command line names."""
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in table(real_parser()).items())
    Path(sys.argv[1]).write_text(f'{{"vllm": "{version("vllm").partition("+")[0]}", "options": {{\n{rows}\n}}}}\n')


if __name__ == "__main__":
    main()
