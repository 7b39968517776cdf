"""`kvpilot COMMAND ...`: run a command that a package registers as an entry point of the group `kvpilot.commands`.

Only the requested command is imported, so it runs even if another command's dependencies are missing.
"""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points, version

from kvpilot_formats.installed import lacks

GROUP = "kvpilot.commands"
EXTRAS = {"backtest": "cli", "calibrate": "runtime", "plan": "cli", "probe": "operator", "validate": "cli"}
"""Extra of pyproject.toml that has a command's dependencies."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, with the other arguments. Return its exit status.

    The status is 2 for an unknown command or a missing dependency, 130 after an interrupt, and 141 after a broken pipe.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    usage = f"usage: kvpilot [--version] {{{','.join(sorted(commands))}}} ...  (kvpilot COMMAND --help explains one)"
    if arguments[:1] in (["-h"], ["--help"]):
        print(usage)
        return 0
    if arguments[:1] == ["--version"]:
        print(f"kvpilot {version('kvpilot')}")
        return 0
    if not arguments or arguments[0] not in commands:
        print(f"{usage}\nkvpilot: {arguments[0]!r} is not a command" if arguments else usage, file=sys.stderr)
        return 2
    name = arguments[0]
    try:
        run = commands[name].load()
    except ModuleNotFoundError as error:
        if name not in EXTRAS:
            raise
        lacks(f"kvpilot {name}", EXTRAS[name], error)
    try:
        status = int(run(arguments[1:]))
        sys.stdout.flush()
    except BrokenPipeError:
        # Redirect stdout to the null device. Otherwise Python would flush to the broken pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    return status
