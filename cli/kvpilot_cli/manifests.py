"""Read Kubernetes objects from YAML or JSON files: several documents, List objects, and standard input."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kvpilot_operator.api.names import KIND

Json = Any
STDIN = "-"
MAX_CHARACTERS = 16 * 1024 * 1024


class Found(NamedTuple):
    """An object, and the file that holds it."""

    file: str
    obj: Mapping[str, Json]

    @property
    def kind(self) -> str:
        """Return the object's kind, or the empty string."""
        return str(self.obj.get("kind") or "")

    @property
    def name(self) -> str:
        """Return NAMESPACE/NAME, or NAME without a namespace."""
        about = self.obj.get("metadata")
        given = about if isinstance(about, Mapping) else {}
        return "/".join(str(given[key]) for key in ("namespace", "name") if given.get(key)) or "(no name)"


class ManifestError(ValueError):
    """A file that cannot be read. The message names the file and the remedy."""


def read(file: str) -> Iterator[Found]:
    """Yield every object of a file; `-` is standard input."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = sys.stdin.read() if file == STDIN else Path(file).read_text(encoding="utf-8")
        given = [one for one in yaml.load_all(text, loader) if one is not None]
        # Convert to JSON: it turns YAML's dates into text, as the API server reads them, and refuses cycles and NaN.
        # Aliases of aliases are short in YAML but may grow without end in JSON, so stop at MAX_CHARACTERS.
        parts, room = [], MAX_CHARACTERS
        for part in json.JSONEncoder(default=str, allow_nan=False).iterencode(given):
            parts.append(part)
            if (room := room - len(part)) < 0:
                break
        documents = json.loads("".join(parts)) if room >= 0 else None
    except IsADirectoryError:
        raise ManifestError(f"{file} is a folder: name its files, such as {file.rstrip('/')}/*.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{file} cannot be read ({error}): give a text file in UTF-8, or - for stdin") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        # Never quote the file's content, because it may hold secrets.
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark is not None else type(error).__name__
        raise ManifestError(f"{file} is neither YAML nor JSON ({where}): correct it") from None
    if documents is None:
        raise ManifestError(
            f"{file} has over {MAX_CHARACTERS} characters of JSON: split it, or write fewer YAML aliases"
        )
    for document in documents:
        yield from _objects(file, document)


def services(files: list[str]) -> tuple[list[Found], list[Found]]:
    """Return the QuantizedLLMServices of some files, and their other objects."""
    found = [one for file in files for one in read(file)]
    return [one for one in found if one.kind == KIND], [one for one in found if one.kind != KIND]


def _objects(file: str, document: Json) -> Iterator[Found]:
    if not isinstance(document, Mapping):
        raise ManifestError(f"{file} holds a {type(document).__name__} instead of an object: give manifests")
    items = document.get("items")
    if not str(document.get("kind") or "").endswith("List") or not isinstance(items, list):
        yield Found(file, document)
        return
    for item in items:
        yield from _objects(file, item)
