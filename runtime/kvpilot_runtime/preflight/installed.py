"""Find out which models the installed vLLM knows. Parse vLLM's source text, because importing vLLM takes seconds."""

import ast
import functools
import importlib.util
from pathlib import Path

from kvpilot_runtime.config.connectors import Connector, other_release
from kvpilot_runtime.vllm_api import compat

_NOT_SERVED = {"_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS"}
_POOLING = {
    "_EMBEDDING_MODELS", "_LATE_INTERACTION_MODELS", "_REWARD_MODELS", "_TOKEN_CLASSIFICATION_MODELS",
    "_SEQUENCE_CLASSIFICATION_MODELS",
}  # fmt: skip


def known_architectures() -> frozenset[str]:
    """Return the architectures in vLLM's model registry; none if vLLM or its registry is not found."""
    return frozenset().union(*_registry().values())


def pooling_architectures() -> frozenset[str]:
    """Return the architectures that only embed, score or classify text."""
    tables = _registry()
    return known_architectures().difference(*(names for table, names in tables.items() if table not in _POOLING))


@functools.cache
def _registry() -> dict[str, frozenset[str]]:
    """Return the names in each table of vLLM's model registry, by table."""
    tree = _parse("vllm", "model_executor/models/registry.py")
    found: dict[str, frozenset[str]] = {}
    for node in tree.body if tree is not None else ():
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        tables = [t.id for t in targets if isinstance(t, ast.Name)]
        if isinstance(value, ast.Dict) and any(t.endswith("_MODELS") and t not in _NOT_SERVED for t in tables):
            keys = (k.value for k in value.keys if isinstance(k, ast.Constant))
            found[tables[0]] = frozenset(k for k in keys if isinstance(k, str))
    return found


@functools.cache
def known_model_types() -> frozenset[str]:
    """Return the `model_type`s that vLLM reads with its own config classes; none if vLLM is absent."""
    tree = _parse("vllm", "transformers_utils/config.py")
    names: set[str] = set()
    for node in tree.body if tree is not None else ():
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if node.target.id == "_CONFIG_REGISTRY" and isinstance(node.value, ast.Call):
            for keyword in node.value.keywords:
                spread = keyword.value.keys if isinstance(keyword.value, ast.Dict) else ()
                names.update(k.value for k in spread if isinstance(k, ast.Constant) and isinstance(k.value, str))
                names.update([keyword.arg] if keyword.arg else ())
    return frozenset(names)


def lacks(connector: Connector) -> str:
    """Name the version or package that a connector needs and this machine lacks.

    Return an empty string if nothing is missing, or if vLLM is not installed.
    """
    if lacks := compat.lacks(pinned=True):
        return lacks
    if importlib.util.find_spec("vllm") is None:
        return ""
    if importlib.util.find_spec(connector.package) is None:
        return f"the package {connector.package}"
    if (other := other_release(connector)) and connector.release:
        return f"{connector.package} {compat.shown(connector.release)} (here is {other})"
    return ""


def known_to_transformers(architecture: str) -> bool:
    """Return True if the installed transformers has this class. vLLM may then serve the model through transformers."""
    tree = _parse("transformers", "models/auto/modeling_auto.py")
    return tree is not None and any(
        isinstance(node, ast.Constant) and node.value == architecture for node in ast.walk(tree)
    )


def _parse(package: str, path: str) -> ast.Module | None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    try:
        return ast.parse(Path(spec.origin).parent.joinpath(path).read_text())
    except (OSError, SyntaxError):
        return None
