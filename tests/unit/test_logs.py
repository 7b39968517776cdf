"""Log lines are JSON and name their service, whatever text the message contains."""

import json
import logging
import subprocess
import sys

from kvpilot_operator.control.logs import JsonLines


def line(message: object, *arguments: object, **extra: object) -> dict[str, object]:
    record = logging.LogRecord("kvpilot_operator.control.pilot", logging.WARNING, "", 0, message, arguments, None)
    record.__dict__ |= extra
    text = JsonLines().format(record)
    assert "\n" not in text
    found: dict[str, object] = json.loads(text)
    return found


def test_a_line_has_time_level_logger_message_and_service():
    found = line("reconcile failed: %s", "HTTP 500", service="models/chat", action="Hold", reason="CoolingDown")
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "warning",
        "logger": "kvpilot_operator.control.pilot",
        "message": "reconcile failed: HTTP 500",
        "service": "models/chat",
        "action": "Hold",
        "reason": "CoolingDown",
    }


def test_a_log_line_has_only_the_listed_fields():
    assert "secret" not in json.dumps(line("x", token="secret", kubeconfig="secret"))


def test_line_breaks_and_quotes_stay_in_one_line():
    assert line('one\ntwo "three" 🚀')["message"] == 'one\ntwo "three" 🚀'


def test_the_error_that_ends_the_process_is_one_line_with_its_traceback():
    program = "from kvpilot_operator.control.logs import configure; configure('info'); raise OSError('no kubeconfig')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    (last,) = map(json.loads, ended.stderr.splitlines())
    assert (last["level"], last["message"]) == ("critical", "OSError: no kubeconfig")
    assert "Traceback" in last["exception"]


def test_warnings_of_python_have_the_same_form_and_chatty_libraries_are_quiet():
    program = (
        "from kvpilot_operator.control.logs import configure; configure('debug'); import logging, warnings;"
        "warnings.warn('old'); logging.getLogger('asyncio').info('x'); logging.getLogger('kvpilot_operator').debug('d')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = [json.loads(text) for text in ended.stderr.splitlines()]
    assert [(one["logger"], one["level"]) for one in lines] == [
        ("py.warnings", "warning"),
        ("kvpilot_operator", "debug"),
    ]
