"""Entry point of `kvpilot-operator`. It checks that the operator's dependencies are installed."""

import sys

from kvpilot_formats.installed import lacks
from kvpilot_operator.options import parse_arguments


def main() -> None:
    """Run the operator. Exit with status 2 if the extra `operator` is not installed."""
    options = parse_arguments(sys.argv[1:])
    try:
        from kvpilot_operator.main import main as run
    except ModuleNotFoundError as error:
        lacks("kvpilot-operator", "operator", error)
    run(options)
