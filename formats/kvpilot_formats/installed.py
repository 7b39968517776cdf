"""The installed version of kvpilot, for the option --version of each command."""

from __future__ import annotations

import argparse
from importlib.metadata import version


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add --version, which prints the command's name and kvpilot's version, and exits."""
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {version('kvpilot')}", help="print the version"
    )
