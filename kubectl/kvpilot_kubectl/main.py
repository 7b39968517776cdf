"""Entry point `kubectl-kvpilot`, which kubectl runs for `kubectl kvpilot`."""

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence

from kvpilot_formats.installed import lacks
from kvpilot_kubectl.commands import PROG, parser
from kvpilot_kubectl.errors import INTERRUPTED, REFUSED, ToolError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Replace characters in messages that the user's terminal cannot show.
        sys.stdout.reconfigure(errors="replace")
    try:
        options = parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except ToolError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return error.code
    except ModuleNotFoundError as error:
        lacks(PROG, "kubectl", error)
    except BrokenPipeError:
        # The reader has closed the pipe. Redirect stdout, so that Python does not write to the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
