"""Gateway API objects in a service's spec: routes and InferencePools."""

from typing import Annotated, Literal

from msgspec import Meta

from kvpilot_operator.api.record import Name, Record, Rule, rules


class RouteRef(Record, frozen=True):
    """Your HTTPRoute (Gateway API) in this namespace that sends requests to this service. kvpilot sets the weights of
    its backends (Services or InferencePools NAME and NAME-canary) to the canary's share, and restores the route after
    the trial. If not set, the canary's share is its share of the replicas behind the Service NAME."""

    name: Name
    """The HTTPRoute's name."""


class Port(Record, frozen=True):
    """A port of a Service."""

    number: Annotated[int, Meta(ge=1, le=65_535)]
    """The port's number."""


class EndpointPickerRef(Record, frozen=True):
    """The endpoint picker of one pool, with the fields of an InferencePool's endpointPickerRef."""

    name: Name
    """Name of the picker's Service, in this namespace."""
    port: Port
    """Port of that Service."""
    failure_mode: Literal["FailOpen", "FailClose"] = "FailClose"
    """Behaviour of the gateway while the picker does not answer. FailOpen: send requests to any pod of the pool.
    FailClose: send no requests."""


@rules(
    Rule(
        ".canaryEndpointPickerRef",
        "!has(self.canaryEndpointPickerRef) || has(self.endpointPickerRef) && "
        "self.canaryEndpointPickerRef.name != self.endpointPickerRef.name",
        "inferencePool.canaryEndpointPickerRef needs endpointPickerRef beside it, with another name, since a picker "
        "serves one pool: run a picker for each of NAME and NAME-canary, and set both",
    )
)
class InferencePool(Record, frozen=True):
    """InferencePools (Gateway API Inference Extension, v1) that kvpilot creates. The pool NAME (the name of this
    object) selects the same pods as the Service NAME. If canary.routeRef is set, the pool NAME-canary takes a canary's
    share. Without this field, kvpilot creates no pools."""

    endpoint_picker_ref: EndpointPickerRef | None = None
    """Endpoint picker of the pool NAME. If not set, the gateway must pick endpoints itself, which needs v1.6 of the
    extension or newer."""
    canary_endpoint_picker_ref: EndpointPickerRef | None = None
    """Endpoint picker of the pool NAME-canary. It must differ from endpointPickerRef, because a picker serves only
    one pool. If not set, the pool NAME-canary has no picker."""
