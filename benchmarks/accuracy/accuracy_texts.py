"""Texts of the accuracy table: real, freely available, and not part of this repository.

The table is computed on Newton's *Opticks* (1704), the manual of GNU coreutils (Debian's info page), Python's language
reference (`pydoc_data.topics`) and source code of Python's standard library. *Opticks* is a file of libbacktrace's
sources. These are in the package apache-tvm-ffi, which vLLM requires.
"""

import ast
import gzip
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch

CODE = ("argparse.py", "asyncio/base_events.py", "typing.py", "zipfile.py")

Sequence = tuple[str, torch.Tensor]
"""Name of a text, and its tokens, int64 [tokens]."""

EVALUATION = ("opticks", "manual", "reference", "code")


def text(name: str) -> str:
    """Return a text by its name.

    Raises:
        FileNotFoundError: this machine lacks the document; the message names the package that has it.
    """
    if name == "opticks":
        found = importlib.util.find_spec("tvm_ffi")
        folders = list(found.submodule_search_locations or []) if found else []
        return _read([Path(f, "3rdparty/libbacktrace/Isaac.Newton-Opticks.txt") for f in folders], "apache-tvm-ffi")
    if name == "manual":
        return _prose(_read([Path("/usr/share/info/coreutils.info.gz")], "Debian's coreutils"))
    if name == "reference":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[key] for key in sorted(topics))
    stdlib = Path(ast.__file__).parent
    return "\n\n".join((stdlib / n).read_text() for n in CODE)


def _read(paths: list[Path], package: str) -> str:
    if not paths or not paths[0].exists():
        raise FileNotFoundError(f"{package} is not installed here, and the benchmark uses its text")
    opened = (path.read_bytes() for path in paths)
    return b"".join(gzip.decompress(x) if x[:2] == b"\x1f\x8b" else x for x in opened).decode(errors="replace")


def _prose(info: str) -> str:
    """Return the text of an info file without node headers and separators."""
    return re.sub(r"\x1f\n[^\n]*\n", "", info).replace("\x1f", "")


def sequences(tokenizer: Any, plan: list[tuple[str, int, int]]) -> list[Sequence]:
    """Return sequences of the texts, each with the special tokens that the tokenizer puts before a prompt.

    Args:
        plan: (name of the text, tokens, number of sequences). The sequences of a text are consecutive and do not
            overlap.
    """
    at: dict[str, int] = {}
    tokens: dict[str, torch.Tensor] = {}
    cut = []
    begin = torch.tensor(tokenizer("").input_ids, dtype=torch.int64)
    for name, length, count in plan:
        if name not in tokens:
            body = text(name)
            # Skip a document's title and table of contents.
            body = body[len(body) // 20 : 700_000]
            tokens[name] = torch.tensor(tokenizer(body, add_special_tokens=False).input_ids)
            at[name] = 0
        for _ in range(count):
            piece = torch.cat([begin, tokens[name][at[name] : at[name] + length - begin.numel()]])
            if piece.numel() < length:
                raise ValueError(f"text {name!r} has no {length} tokens left after {at[name]}; use less of it")
            at[name] += length - begin.numel()
            cut.append((name, piece))
    return cut
