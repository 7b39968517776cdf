"""kopf's part: watches on services and on what they own; each event only asks the pilot for a pass."""

from __future__ import annotations

from typing import Any

import kopf

from kvpilot_operator.control.pilot import Pilot
from kvpilot_operator.render.names import GROUP, PLURAL, SERVICE_LABEL, VERSION
from kvpilot_operator.state.snapshot import ServiceKey


def registry(pilot: Pilot) -> kopf.OperatorRegistry:
    """Handlers without state of their own: no finalizers, no annotations, nothing to be remembered by kopf."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.startup(registry=handlers)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        # A watch that dies silently is the classic failure: bound it on both sides.
        settings.watching.server_timeout = 300
        settings.watching.client_timeout = 330
        settings.watching.connect_timeout = 10
        settings.posting.enabled = False
        settings.scanning.disabled = True

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)
    def service_changed(namespace: str | None, name: str, **_: Any) -> None:
        pilot.seen(ServiceKey(namespace or "", name))

    def owned_changed(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        pilot.passes.ask(ServiceKey(namespace or "", labels[SERVICE_LABEL]))

    for resource in (("apps", "v1", "deployments"), ("", "v1", "pods"), ("", "v1", "services")):
        kopf.on.event(*resource, labels={SERVICE_LABEL: kopf.PRESENT}, registry=handlers)(owned_changed)
    return handlers
