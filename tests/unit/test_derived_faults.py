"""Each limit of the CRD's spec has a manifest that breaks it: derived of the schema, and of rules in the corpus."""

from __future__ import annotations

from kvpilot_operator.api.schema import apply_defaults, faults
from support.bad_manifests import BAD
from support.derived_manifests import Wrong, derived, leaves, service_with, together, unbroken_rules


def told(case: Wrong, message: str) -> bool:
    """Whether a message has the value, unless it may be a secret or is no word or number, and the remedy."""
    scalar = isinstance(case.value, (str, int)) and not isinstance(case.value, bool)
    shown = repr(case.value)[:90] if scalar else ""
    return case.remedy in message and (shown in message or "a value that is not shown" in message)


def test_what_breaks_a_limit_is_faulted_at_its_field_with_the_value_and_a_remedy() -> None:
    silent = []
    for group in together():
        found = faults(service_with(group))
        silent += [
            (case.field, case.keyword, [fault.message for fault in found if fault.field == case.field])
            for case in group
            if not any(fault.field == case.field and told(case, fault.message) for fault in found)
        ]
    assert silent == []


def test_every_field_of_the_spec_has_a_case() -> None:
    assert set(leaves()) <= {case.field for case in derived()}


def test_every_rule_is_broken_by_a_manifest_of_the_corpus() -> None:
    rows = [(apply_defaults(bad.manifest), bad.field) for bad in BAD]
    assert unbroken_rules(rows) == []
    every = unbroken_rules([])
    assert len(every) > len(unbroken_rules(rows[-20:])) > 0
