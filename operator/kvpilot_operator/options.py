"""The command line of `kvpilot-operator`, and its entry point."""

import argparse
import os
import sys
from pathlib import Path

import msgspec

from kvpilot_formats.installed import add_version, lacks
from kvpilot_operator.api.engine_defaults import NO_DEFAULTS, EngineDefaults
from kvpilot_operator.api.pod_template import KINDS

PURPOSE = "Choose the KV-cache dtype of each QuantizedLLMService, and check the accuracy of its answers."


def main() -> None:
    """Run the operator. Exit with status 2 if the extra `operator` is not installed."""
    options = parse_arguments(sys.argv[1:])
    try:
        from kvpilot_operator.main import main as run
    except ModuleNotFoundError as error:
        lacks("kvpilot-operator", "operator", error)
    run(options)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="kvpilot-operator", description=PURPOSE)
    add_version(parser)
    parser.add_argument(
        "--namespace", action="append", default=[], help="watch this namespace only (may be repeated; default: all)"
    )
    parser.add_argument("--scrape-seconds", type=float, default=5.0, help="seconds between two scrapes (5)")
    parser.add_argument("--http-host", help="address of /healthz, /readyz and /metrics (all, of IPv4 and IPv6)")
    parser.add_argument("--http-port", type=int, default=8080, help="port of /healthz, /readyz and /metrics (8080)")
    parser.add_argument(
        "--metrics-authentication",
        action="store_true",
        help="answer /metrics only to bearer tokens whose users the API server permits to get that path (plain HTTP)",
    )
    parser.add_argument(
        "--allow-host-access",
        action="append",
        default=[],
        choices=KINDS,
        help="allow this access to nodes in engine.podTemplate (may be repeated; default: none)",
    )
    parser.add_argument(
        "--engine-defaults",
        type=_engine_defaults,
        default=NO_DEFAULTS,
        metavar="JSON",
        help="image, imagePullSecrets and tolerations for services that do not set them",
    )
    parser.add_argument(
        "--mesh-certificates",
        type=Path,
        metavar="DIR",
        help="folder with Istio's cert-chain.pem, key.pem and root-cert.pem, to reach engines with a sidecar",
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument(
        "--leader-elect", action="store_true", help="act only while this replica holds the Lease (several replicas)"
    )
    parser.add_argument("--lease-name", default="kvpilot-operator", help="name of the Lease (kvpilot-operator)")
    parser.add_argument(
        "--lease-namespace", default=os.environ.get("POD_NAMESPACE", ""), help="namespace of the Lease ($POD_NAMESPACE)"
    )
    parser.add_argument(
        "--lease-seconds", type=int, default=15, help="seconds until a standby replaces a dead leader (15)"
    )
    options = parser.parse_args(arguments)
    if options.leader_elect and not options.lease_namespace:
        parser.error("--leader-elect needs --lease-namespace NAMESPACE, or POD_NAMESPACE in the environment")
    if not 15 <= options.lease_seconds <= 300:
        parser.error(f"--lease-seconds: {options.lease_seconds} is not between 15 and 300 seconds")
    if (folder := options.mesh_certificates) is not None and not folder.is_dir():
        parser.error(
            f"--mesh-certificates: {folder}: is not a folder; mount the volume that the sidecar writes to there"
        )
    return options


def _engine_defaults(text: str) -> EngineDefaults:
    try:
        return msgspec.json.decode(text, type=EngineDefaults)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(
            f'{error}; give a JSON object such as {{"image": "NAME"}}, as the chart writes it from its values engines.*'
        ) from None
