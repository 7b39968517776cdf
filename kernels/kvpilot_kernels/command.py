"""`kvpilot COMMAND ...`: each package brings its own commands, as entry points of the group `kvpilot.commands`.

They are looked up by name, so that one of them can run where another's dependencies are not installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

GROUP = "kvpilot.commands"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names with the others; returns its exit status, 2 for a wrong name.

    130 where it was interrupted, and 141 where its reader has left: what a shell says of SIGINT and SIGPIPE.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    usage = f"usage: kvpilot {{{','.join(sorted(commands))}}} ...  (kvpilot COMMAND --help explains one)"
    if arguments[:1] in (["-h"], ["--help"]):
        print(usage)
        return 0
    if not arguments or arguments[0] not in commands:
        print(f"{usage}\nkvpilot: {arguments[0]!r} is no command" if arguments else usage, file=sys.stderr)
        return 2
    try:
        status = int(commands[arguments[0]].load()(arguments[1:]))
        sys.stdout.flush()
    except BrokenPipeError:
        # Nothing more is written at the end of the process either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    return status
