"""Gateway API objects in a service's spec: routes, Gateways and InferencePools."""

from typing import Annotated, Literal

from msgspec import Meta

from kvpilot_operator.api.record import SET, Label, Name, Record, Rule, rules

_HOST = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
Hostname = Annotated[str, Meta(min_length=1, max_length=253, pattern=_HOST)]

_GATEWAYS_DIFFER = Rule(
    "",
    "self.all(a, self.exists_one(b, a == b))",
    "route.parentRefs names a Gateway, or a listener of it, twice: remove one of the two",
)


class RouteRef(Record, frozen=True):
    """The Gateway API HTTPRoute that sends users to this service, in its namespace. Steps are set as weights of its
    backends (the Service NAME, or the InferencePool NAME); without it, by the number of replicas behind the Service."""

    name: Name
    """The HTTPRoute's name."""


class Port(Record, frozen=True):
    """A port of a Service."""

    number: Annotated[int, Meta(ge=1, le=65_535)]
    """The port's number."""


class EndpointPickerRef(Record, frozen=True):
    """The endpoint picker of one pool, as an InferencePool has it."""

    name: Name
    """Name of the picker's Service, in this namespace."""
    port: Port
    """Port of that Service."""
    failure_mode: Literal["FailOpen", "FailClose"] = "FailClose"
    """Behaviour of the gateway while the picker does not answer: FailOpen sends requests to any pod of the pool,
    FailClose to none."""


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
    """InferencePools of the Gateway API Inference Extension, v1: NAME selects what the Service NAME selects, and with a
    route (route, or canary.routeRef) NAME-canary takes a canary's share. Without it there are none."""

    endpoint_picker_ref: EndpointPickerRef | None = None
    """The endpoint picker of the pool NAME alone. Releases v1.0 to v1.5 of the extension need it; as of v1.6 it may be
    left out, for a gateway that picks itself."""
    canary_endpoint_picker_ref: EndpointPickerRef | None = None
    """The endpoint picker of the pool NAME-canary."""


class ParentRef(Record, frozen=True):
    """One item of spec.route.parentRefs: a Gateway, or one of its listeners."""

    name: Name
    """Name of the Gateway."""
    namespace: Label | None = None
    """Its namespace, without it the service's. The Gateway's listener has to allow routes from there."""
    section_name: Name | None = None
    """Name of one of its listeners. Without it the route asks for all of them."""


Parents = Annotated[tuple[ParentRef, ...], Meta(min_length=1, max_length=8, extra={"rules": (_GATEWAYS_DIFFER,)})]


class Route(Record, frozen=True):
    """An HTTPRoute NAME that kvpilot makes and owns, and deletes with this field. It sends to the InferencePool NAME
    with inferencePool, else to the Service NAME; a canary's steps are its weights. For a route of your own set
    canary.routeRef."""

    parent_refs: Parents
    """The Gateways that the route asks to be attached to."""
    hostnames: Annotated[tuple[Hostname, ...], Meta(max_length=16, extra=SET)] = ()
    """Hosts that the route answers for, as *.example.com; without any, those of the listeners."""
