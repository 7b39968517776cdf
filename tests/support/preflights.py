"""Requests to start kvpilot-serve, and the errors with which preflight refuses them."""

import pytest

from kvpilot_runtime import serve
from kvpilot_runtime.errors import PreflightError
from kvpilot_runtime.preflight.check import check
from kvpilot_runtime.preflight.request import Request
from kvpilot_smallmodels.models import tiny_llama


def asked(*arguments: str, dtype: str = "k4v4", model: str | None = None) -> Request:
    """Return the request that kvpilot-serve makes of these arguments."""
    return serve.parse([f"--model={model or tiny_llama()}", f"--kv-cache-dtype={dtype}", *arguments])[0]


def refusal(request: Request) -> PreflightError:
    """Return the error with which preflight refuses a request."""
    with pytest.raises(PreflightError) as caught:
        check(request)
    return caught.value
