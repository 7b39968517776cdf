"""The only way in which kvpilot replaces a function of vLLM's."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

MARK = "_kvpilot_wraps"
"""Attribute of a wrapper: the names of all functions of ours around vLLM's."""


def wrap(path: str, ours: Callable[..., Any]) -> None:
    """Call `ours` in place of a function of vLLM's: with that function first, then with all that the caller passes.

    `ours` names the parameters that it reads, and passes on `*args` and `**kwargs`: a later vLLM may have more of them.
    Repeating it changes nothing.

    Args:
        path: `module:name`, perhaps with dots; a function, a method, a class method or a static method.
    """
    module, _, name = path.partition(":")
    *above, last = name.split(".")
    owner = functools.reduce(getattr, above, importlib.import_module(module))
    found = inspect.getattr_static(owner, last)
    kind = type(found) if isinstance(found, classmethod | staticmethod) else None
    stock = found.__func__ if kind else found
    around = getattr(stock, MARK, ())
    if ours.__qualname__ in around:
        return

    @functools.wraps(stock)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ours(stock, *args, **kwargs)

    setattr(wrapper, MARK, (*around, ours.__qualname__))
    setattr(owner, last, kind(wrapper) if kind else wrapper)
