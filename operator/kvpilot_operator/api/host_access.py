"""What of a pod template reaches beyond its container, into the node: what Pod Security "baseline" refuses.

The API server lets it through, for a Pod may have it; whether engines may is said by the administrator of the cluster
(`--allow-host-access`, the chart's engines.hostAccess).
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

Json = Any

KINDS = ("capabilities", "hostIPC", "hostNetwork", "hostPID", "hostPath", "privileged")
"""What can be allowed, each by itself."""

_BASELINE_CAPABILITIES = frozenset(
    (
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE"),
        *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    )
)


def refused(pod_template: Mapping[str, Json], allowed: Collection[str]) -> Iterator[tuple[str, str]]:
    """(field, message) of each access to the node that is not among `allowed`.

    `pod_template` is spec.engine.podTemplate without schema faults; fields are relative to it, with a leading dot.
    """
    for kind, field, shown in _asked(pod_template.get("spec", {})):
        if kind not in allowed:
            yield (
                f".spec{field}",
                f"is {shown}: engines of this cluster may not reach into their node: remove it, or let its "
                f"administrator add {kind} to engines.hostAccess of kvpilot's chart",
            )


def _asked(pod: Mapping[str, Json]) -> Iterator[tuple[str, str, str]]:
    """(kind, field, value in words) of each access to the node."""
    for kind in ("hostIPC", "hostNetwork", "hostPID"):
        if pod.get(kind):
            yield kind, f".{kind}", "true"
    for index, volume in enumerate(pod.get("volumes", ())):
        if "hostPath" in volume:
            yield "hostPath", f".volumes[{index}].hostPath", repr(volume["hostPath"]["path"])
    for group in ("initContainers", "containers"):
        for index, container in enumerate(pod.get(group, ())):
            field, context = f".{group}[{index}].securityContext", container.get("securityContext", {})
            if context.get("privileged"):
                yield "privileged", f"{field}.privileged", "true"
            added = [one for one in context.get("capabilities", {}).get("add", ()) if one not in _BASELINE_CAPABILITIES]
            if added:
                yield "capabilities", f"{field}.capabilities.add", ", ".join(added)
