"""Command-line flags of the operator that configure leader election."""

import pytest

from kvpilot_operator.options import parse_arguments


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(list(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_by_default_there_is_no_election(monkeypatch):
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    assert not parse_arguments([]).leader_elect


def test_the_lease_is_in_the_pods_namespace(monkeypatch):
    monkeypatch.setenv("POD_NAMESPACE", "kvpilot-system")
    options = parse_arguments(["--leader-elect"])
    assert (options.lease_namespace, options.lease_name, options.lease_seconds) == (
        "kvpilot-system",
        "kvpilot-operator",
        15,
    )


def test_without_a_namespace_the_error_names_both_remedies(monkeypatch, capsys):
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    said = refused(capsys, "--leader-elect")
    assert "--lease-namespace" in said
    assert "POD_NAMESPACE" in said


@pytest.mark.parametrize("seconds", ["14", "301", "-1"])
def test_a_lease_that_is_too_short_or_too_long_is_refused_with_the_limits(capsys, seconds):
    assert f"{seconds} is not between 15 and 300 seconds" in refused(capsys, f"--lease-seconds={seconds}")


def test_a_duration_that_is_not_a_number_is_refused(capsys):
    assert "--lease-seconds: invalid int value: 'soon'" in refused(capsys, "--lease-seconds=soon")
