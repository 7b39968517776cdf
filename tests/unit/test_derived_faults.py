"""The operator refuses an object with a field beyond a schema limit, because the object may be older than the limit."""

from kvpilot_operator.api.faults import faults
from support.derived_manifests import Wrong, derived, leaves, service_with


def told(case: Wrong, message: str) -> bool:
    """Return True if a message has a remedy and the value.

    The value may be missing if it is secret, in a map or not a scalar.
    """
    scalar = isinstance(case.value, (str, int)) and not isinstance(case.value, bool) and not case.field.endswith(".a")
    shown = repr(case.value)[:90] if scalar else ""
    remedy = "set " if case.keyword == "required" else "use a value"
    return remedy in message and (shown in message or "a value that is not shown" in message)


def test_a_value_beyond_a_limit_is_a_fault_with_field_value_and_remedy() -> None:
    silent = []
    # Only the server checks lists for duplicate items.
    for case in (one for one in derived() if one.keyword != "x-kubernetes-list-type"):
        found = faults(service_with([case]))
        if not any(case.field.startswith(fault.field) and told(case, fault.message) for fault in found):
            silent.append((case.field, case.keyword, found))
    assert silent == []


def test_a_case_of_this_test_exists_for_every_field_of_the_spec() -> None:
    assert set(leaves()) <= {case.field for case in derived()}
