"""kopf's part: the watch on services. Each event only goes into the fleet's cache, which asks for a pass."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import kopf

from kvpilot_operator.cluster.client import SILENCE_SECONDS
from kvpilot_operator.observe.fleet import Fleet
from kvpilot_operator.render.names import GROUP, PLURAL, VERSION


class Pauses:
    """Seconds between attempts, for ever, and anew for each request."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1.0, 2.0, 4.0)
        yield from repeat(5.0)


def registry(fleet: Fleet) -> kopf.OperatorRegistry:
    """Handlers without state of their own: no finalizers, no annotations, nothing to be remembered by kopf."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.startup(registry=handlers)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        # A watch that dies silently is the classic failure: bound it on both sides.
        settings.watching.server_timeout = 300
        settings.watching.client_timeout = 330
        settings.watching.connect_timeout = 10
        settings.watching.inactivity_timeout = SILENCE_SECONDS
        # An outage may last: kopf gives up, and ends, when it has no pause left.
        settings.networking.error_backoffs = Pauses()
        settings.networking.connect_timeout = 10
        settings.networking.request_timeout = 30
        settings.posting.enabled = False
        settings.scanning.disabled = True

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)
    def service_changed(event: kopf.RawEvent, **_: Any) -> None:
        if event["type"] == "DELETED":
            fleet.services.drop(dict(event["object"]))
        else:
            fleet.services.put(dict(event["object"]))

    return handlers
