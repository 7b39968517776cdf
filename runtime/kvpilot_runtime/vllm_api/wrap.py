"""Replace functions of vLLM. All of kvpilot's replacements go through `wrap`."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

MARK = "_kvpilot_wraps"
"""Attribute of a wrapper with the names of our functions that it calls."""


def wrap(path: str, ours: Callable[..., Any]) -> None:
    """Replace a function of vLLM by `ours`, which gets vLLM's function first, and then the caller's arguments.

    `ours` names only the parameters that it reads, and passes on `*args` and `**kwargs`, because a later vLLM may have
    more parameters. A second call with the same `ours` changes nothing.

    Args:
        path: `module:name` of a function, a method, a class method or a static method. The name may have dots.
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
