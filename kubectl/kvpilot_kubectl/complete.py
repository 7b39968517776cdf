"""Shell completion of commands, options and names from the cluster.

To complete `kubectl kvpilot`, kubectl 1.26 and newer runs `kubectl_complete-kvpilot WORD... LAST`.
"""

import argparse
import io
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator

from argcomplete.finders import CompletionFinder

from kvpilot_kubectl.commands import cluster, parser
from kvpilot_kubectl.errors import ToolError
from kvpilot_kubectl.fields import text

# Directives in the last line (cobra's ShellCompDirective), which tell kubectl if it may complete file names.
_FILES, _NO_FILES = ":0", ":4"
_PROGRAM = "kubectl-kvpilot"


def main() -> int:
    """Print the candidates for the last argument, one per line, and a directive for kubectl."""
    words = sys.argv[1:] or [""]
    for one in candidates(words):
        print(one)
    print(_FILES if _wants_file(words) else _NO_FILES)
    return 0


def candidates(words: list[str]) -> list[str]:
    """Return the words that may complete the last of `words`."""
    if _wants_file(words):
        return []
    line = f"{shlex.join([_PROGRAM, *words[:-1]])} {words[-1]}"
    told = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line.encode())),
    }
    before = dict(os.environ)
    os.environ.update(told)
    found = io.StringIO()
    try:
        _Finder()(_parser(), exit_method=_stay, output_stream=found, always_complete_options=False)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return sorted({one.strip() for one in found.getvalue().split("\n")} - {""})


class _Finder(CompletionFinder):
    """A finder that does not open file descriptor 9, which only argcomplete's shell code sets up, for debugging."""

    def _init_debug_stream(self) -> None:
        pass


def _stay(_: int = 0) -> None:
    """Do nothing. argcomplete calls this function where it would otherwise exit the process."""


def _wants_file(words: list[str]) -> bool:
    return words[-1].startswith("--kubeconfig=") or words[-2:-1] == ["--kubeconfig"]


def _parser() -> argparse.ArgumentParser:
    whole = parser()
    for part in parts(whole):
        for action in part._actions:
            if (completer := _COMPLETERS.get(action.dest)) is not None:
                action.completer = completer  # type: ignore[attr-defined]
    return whole


def parts(whole: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and the parsers of its commands."""
    yield whole
    for action in whole._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def _known(ask: Callable[[argparse.Namespace], Iterable[str]]) -> Callable[..., list[str]]:
    """Return a completer for argcomplete. It completes nothing if the cluster does not answer."""

    def complete(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
        try:
            return [one for one in ask(parsed_args) if one.startswith(prefix)]
        except ToolError:
            return []

    return complete


def _services(options: argparse.Namespace) -> Iterator[str]:
    yield from (text(one, "metadata", "name") for one in cluster(options).services())


def _namespaces(options: argparse.Namespace) -> Iterator[str]:
    yield from cluster(options).namespaces()


def _contexts(options: argparse.Namespace) -> Iterator[str]:
    from kvpilot_kubectl.api import contexts

    yield from contexts(getattr(options, "kubeconfig", None))[0]


_COMPLETERS = {
    "service": _known(_services),
    "namespace": _known(_namespaces),
    "context": _known(_contexts),
}
