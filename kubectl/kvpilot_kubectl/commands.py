"""`kubectl kvpilot COMMAND`: what services do and why, and the few things to tell them. See docs/kubectl.md.

Exit codes: 0 done, 1 not found or refused, 2 a wrong argument, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

from kvpilot_kubectl.errors import DONE, ToolError, UsageError

PROG = "kubectl kvpilot"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')} (`{self.prog} --help` explains)")


def parser() -> argparse.ArgumentParser:
    """All commands with their options; every option may stand before the command, too."""
    common = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("-n", "--namespace", type=_name, metavar="NAME", help="default: the context's own")
    common.add_argument("--context", metavar="NAME", help="of the client configuration (default: the current one)")
    common.add_argument(
        "--kubeconfig", metavar="FILE", help="client configuration (default: KUBECONFIG, ~/.kube/config)"
    )
    common.add_argument("-o", "--output", choices=["json"], help="print JSON instead of text")
    whole = _Parser(
        prog=PROG,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[common],
    )
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

    status = command("status", _status, "one line for each service, or all that is known of one", any_service=True)
    status.add_argument("-A", "--all-namespaces", action="store_true", help="services of every namespace")
    command("why", _why, "what was decided and why, oldest first, with the figures that decided")
    plan = command("plan", _plan, "what `kvpilot plan` says of the service's model on its GPU")
    plan.add_argument("--gpu", metavar="NAME", help="instead of the GPU of its nodes; `kvpilot plan --list` has names")
    plan.add_argument("--model", metavar="MODEL", help="a name that --list shows or a folder with a config.json")
    command("pause", _pause, "start no canary, and leave a running one where it is (spec.rollout.paused: true)")
    command("resume", _resume, "go on (spec.rollout.paused: false)")
    undeny = command("undeny", _undeny, "let denied dtypes be tried again (spec.rollout.denySeconds: 0)")
    undeny.add_argument("dtype", metavar="DTYPE", nargs="?", help="refuse unless this dtype alone is denied")
    return whole


def cluster(options: argparse.Namespace) -> Any:
    """The cluster that the options name."""
    from kvpilot_kubectl.api import Cluster

    return Cluster(
        getattr(options, "kubeconfig", None), getattr(options, "context", None), getattr(options, "namespace", None)
    )


def _status(options: argparse.Namespace) -> int:
    from kvpilot_kubectl import pods, service, show

    if options.service is not None and options.all_namespaces:
        raise UsageError("-A/--all-namespaces shows every service: leave SERVICE out, or name its namespace with -n")
    where = cluster(options)
    if options.service is not None:
        found = service.read(where.service(options.service))
        stuck, notes = _stuck(where, options.service)
        if _json(options):
            for note in notes:
                print(f"{PROG}: {note}", file=sys.stderr)
            return _print({**service.document(found), "pods": pods.document(stuck)})
        show.display(show.detailed(found, datetime.now(UTC), stuck, notes))
        return DONE
    services = [service.read(one) for one in where.services(everywhere=options.all_namespaces)]
    services.sort(key=lambda one: (one.namespace, one.name))
    if _json(options):
        return _print({"items": [service.document(one) for one in services]})
    if services:
        show.display([show.listed(services, everywhere=options.all_namespaces)], fold=False)
    else:
        place = "in any namespace" if options.all_namespaces else f"in namespace {where.namespace}"
        print(f"there are no services {place}", file=sys.stderr)
    return DONE


def _stuck(where: Any, name: str) -> tuple[list[Any], list[str]]:
    """What is warned of engine pods that do not answer; the status is told without it where the user may not see it."""
    from kvpilot_kubectl import pods

    found: list[Any] = []
    try:
        for pod in pods.unready(where.pods(name))[: pods.SHOWN]:
            found += pods.warned(pod, where.events(pod["metadata"]["name"], "Pod"))
    except ToolError as error:
        return found, [f"without pods: {error}"]
    return found, []


def _why(options: argparse.Namespace) -> int:
    from kvpilot_kubectl import journal, service, show

    where, notes = cluster(options), []
    obj = where.service(options.service)
    try:
        events = list(where.events(options.service))
    except ToolError as error:
        # The journal in the status has every decision; Events only say more.
        events, notes = [], [f"without Events: {error}"]
    found = journal.entries(obj, events)
    if _json(options):
        for note in notes:
            print(f"{PROG}: {note}", file=sys.stderr)
        return _print(journal.document(obj, found))
    show.display(show.timeline(service.read(obj), found, datetime.now(UTC), notes))
    return DONE


def _plan(options: argparse.Namespace) -> int:
    from kvpilot_kubectl import plan

    return plan.show(cluster(options), options.service, gpu=options.gpu, model=options.model, as_json=_json(options))


def _pause(options: argparse.Namespace) -> int:
    return _change(options, paused=True)


def _resume(options: argparse.Namespace) -> int:
    return _change(options, paused=False)


def _change(options: argparse.Namespace, *, paused: bool) -> int:
    from kvpilot_kubectl import changes

    done = changes.pause(cluster(options), options.service, paused=paused)
    return _print(done.document) if _json(options) else _say(done.said)


def _undeny(options: argparse.Namespace) -> int:
    from kvpilot_kubectl import changes

    done = changes.undeny(cluster(options), options.service, options.dtype, datetime.now(UTC))
    return _print(done.document) if _json(options) else _say(done.said)


def _json(options: argparse.Namespace) -> bool:
    return getattr(options, "output", None) == "json"


def _print(document: dict[str, Any]) -> int:
    return _say(json.dumps(document, indent=2))


def _say(text: str) -> int:
    print(text, flush=True)
    return DONE


def _name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name of an object: use lower-case letters, digits, '-' and '.'"
        )
    return text
