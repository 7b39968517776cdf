"""`kvpilot COMMAND ...`: each package brings its own commands, as entry points of the group `kvpilot.commands`.

They are looked up by name, so that one of them can run where another's dependencies are not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

GROUP = "kvpilot.commands"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names with the others; returns its exit status, 2 for a wrong name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    usage = f"usage: kvpilot {{{','.join(sorted(commands))}}} ...  (kvpilot COMMAND --help explains one)"
    if arguments[:1] in (["-h"], ["--help"]):
        print(usage)
        return 0
    if not arguments or arguments[0] not in commands:
        print(f"{usage}\nkvpilot: {arguments[0]!r} is no command" if arguments else usage, file=sys.stderr)
        return 2
    return int(commands[arguments[0]].load()(arguments[1:]))
