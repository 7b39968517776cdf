"""Installed version and extras of kvpilot, which all commands share."""

import argparse
import sys
from importlib.metadata import version
from typing import NoReturn


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add --version, which prints the command's name and kvpilot's version, and exits."""
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {version('kvpilot')}", help="print the version"
    )


def lacks(program: str, extra: str, error: ModuleNotFoundError) -> NoReturn:
    """Exit with status 2, and name the extra of kvpilot that installs the missing module.

    If one of kvpilot's own modules is missing, the installation is broken: raise the error again.
    """
    if (error.name or "").startswith("kvpilot_"):
        raise error
    remedy = f"pip install 'kvpilot[{extra}]', in a checkout pip install '.[{extra}]'"
    print(f"{program}: the module {error.name} is not installed: {remedy}", file=sys.stderr)
    sys.exit(2)
