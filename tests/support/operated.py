"""Services on a real API server with a real operator process: helpers to create a service and to read its status."""

from typing import Any

from kvpilot_localcluster.rest import HANGS, ApiError, Rest, until

Json = dict[str, Any]


def engine(**more: Any) -> Json:
    """Return spec.engine with an image that no node has, so that no engine starts."""
    return {"engine": {"image": "example.org/runtime:1", **more}}


def placed(**pod: Any) -> Json:
    """Return the spec of a service whose engine pods have these fields in their pod spec."""
    return engine(podTemplate={"spec": pod})


def services(namespace: str) -> str:
    """Return the REST path of the QuantizedLLMServices in a namespace."""
    return f"/apis/kvpilot.io/v1alpha1/namespaces/{namespace}/quantizedllmservices"


def create(rest: Rest, namespace: str, **spec: Any) -> None:
    """Create the service `chat` with a fixed dtype and these sections in its spec."""
    base = {"model": {"source": "hf://Qwen/Qwen3-8B"}, "kvCache": {"mode": "Fixed", "dtype": "auto"}, **engine()}
    body = {
        "apiVersion": "kvpilot.io/v1alpha1",
        "kind": "QuantizedLLMService",
        "metadata": {"name": "chat", "namespace": namespace},
        "spec": {**base, **spec},
    }
    rest.create(services(namespace), body)


def condition(rest: Rest, namespace: str, kind: str) -> Json:
    """Return a condition of `chat`, or an empty one if the type is missing."""
    status = rest.get(f"{services(namespace)}/chat").get("status") or {}
    return next((one for one in status.get("conditions", ()) if one["type"] == kind), {})


def told(rest: Rest, namespace: str, kind: str, reason: str, *, seconds: float = HANGS) -> Json:
    """Wait until a condition of the service `chat` has this reason, and return the condition."""
    found: list[Json] = []

    def seen() -> bool:
        found[:] = [condition(rest, namespace, kind)]
        return found[0].get("reason") == reason

    try:
        until(seen, f"{kind} has reason {reason}", seconds=seconds)
    except TimeoutError as error:
        raise AssertionError(f"{error}: {found}") from None
    return found[0]


def exists(rest: Rest, path: str) -> bool:
    """Return True if the API server has an object at this path."""
    try:
        rest.get(path)
    except ApiError as error:
        return error.status != 404
    return True
