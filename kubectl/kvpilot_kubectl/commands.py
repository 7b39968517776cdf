"""Show what QuantizedLLMServices do and why, and change the course of their canaries. See docs/kubectl.md.

Exit codes: 0 done, 1 not found or refused, 2 wrong argument, 130 interrupted.
"""

import argparse
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn

from kvpilot_formats.installed import add_version
from kvpilot_kubectl.errors import DONE, UsageError

PROG = "kubectl kvpilot"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')} (`{self.prog} --help` explains)")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Accept common options before the command, too."""
    common = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("-n", "--namespace", type=_name, metavar="NAME", help="namespace (default: the context's)")
    common.add_argument(
        "--context", metavar="NAME", help="context of the client configuration (default: the current one)"
    )
    common.add_argument(
        "--kubeconfig", metavar="FILE", help="client configuration (default: KUBECONFIG, ~/.kube/config)"
    )
    whole = _Parser(
        prog=PROG,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[common],
    )
    add_version(whole)
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], about: str, *, any_service: bool = False
    ) -> _Parser:
        made: _Parser = commands.add_parser(
            name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False, parents=[common]
        )
        made.set_defaults(run=run)
        made.add_argument(
            "service", type=_name, metavar="SERVICE", nargs="?" if any_service else None, help="a QuantizedLLMService"
        )
        return made

    status = command("status", _status, "show one line for each service, or all about one", any_service=True)
    status.add_argument("-A", "--all-namespaces", action="store_true", help="show services of all namespaces")
    command("why", _why, "show each decision with its reason and figures, oldest first")
    command("export", _export, "print the service's manifest, with its probed dtype as kvCache.startDtype")
    command("pause", _pause, "start no canary, and hold a running one (spec.rollout.paused: true)")
    command("resume", partial(_pause, paused=False), "continue after a pause (spec.rollout.paused: false)")
    abort = command("abort", _abort, "end the canary at any stage")
    abort.add_argument("--deny", action="store_true", help="also deny the canary's dtype, as after a failed probe")
    command(
        "promote", _promote, "promote the canary without the rest of its traffic steps, once its probes have passed"
    )
    command("retry", _retry, "lift the wait after the last trial, and the denial of its dtype")
    return whole


def cluster(options: argparse.Namespace) -> Any:
    """Return a client of the cluster that the options name."""
    from kvpilot_kubectl.api import Cluster

    return Cluster(
        getattr(options, "kubeconfig", None), getattr(options, "context", None), getattr(options, "namespace", None)
    )


def _status(options: argparse.Namespace) -> int:
    from kvpilot_kubectl import show
    from kvpilot_kubectl.fields import text

    if options.service is not None and options.all_namespaces:
        raise UsageError("-A/--all-namespaces lists all services: leave SERVICE out, or name its namespace with -n")
    where = cluster(options)
    if options.service is not None:
        found = where.service(options.service)
        show.display(show.detailed(found, datetime.now(UTC)))
        return DONE
    services = [*where.services(everywhere=options.all_namespaces)]
    services.sort(key=lambda one: (text(one, "metadata", "namespace"), text(one, "metadata", "name")))
    if services:
        show.display([show.listed(services, everywhere=options.all_namespaces)], fold=False)
    else:
        place = "in any namespace" if options.all_namespaces else f"in namespace {where.namespace}"
        print(f"no services found {place}", file=sys.stderr)
    return DONE


def _why(options: argparse.Namespace) -> int:
    from kvpilot_kubectl import show

    show.display(show.timeline(cluster(options).service(options.service), datetime.now(UTC)))
    return DONE


def _export(options: argparse.Namespace) -> int:
    import yaml

    from kvpilot_kubectl import export

    manifest, about = export.export(cluster(options), options.service)
    print(f"{PROG}: {about}", file=sys.stderr)
    return _say(f"---\n{yaml.safe_dump(manifest, sort_keys=False)}".rstrip())


def _pause(options: argparse.Namespace, *, paused: bool = True) -> int:
    from kvpilot_kubectl import changes

    return _say(changes.pause(cluster(options), options.service, paused=paused))


def _abort(options: argparse.Namespace) -> int:
    from kvpilot_kubectl import changes

    return _say(changes.end(cluster(options), options.service, deny=options.deny))


def _promote(options: argparse.Namespace) -> int:
    from kvpilot_kubectl import changes

    return _say(changes.promote(cluster(options), options.service))


def _retry(options: argparse.Namespace) -> int:
    from kvpilot_kubectl import changes

    return _say(changes.retry(cluster(options), options.service, datetime.now(UTC)))


def _say(text: str) -> int:
    print(text, flush=True)
    return DONE


def _name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid name: use lower-case letters, digits, '-' and '.'")
    return text
