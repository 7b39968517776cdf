"""Installing kvpilot changes no attribute of vLLM, unless the process uses one of our dtypes or options."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_attributes
from vllm.config import cache

import kvpilot_runtime
from kvpilot_runtime import plugin
from kvpilot_runtime.config import options
from kvpilot_runtime.transfer import host
from kvpilot_runtime.vllm_api.wrap import MARK, wrap

pytestmark = pytest.mark.timeout(1800)

PACKAGE = Path(inspect.getfile(kvpilot_runtime)).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Up to vLLM 0.32, pydantic compiles the names of dtypes into two configuration classes.
NAMES = (
    ()
    if hasattr(cache, "register_kv_cache_dtype")
    else ("vllm.config.cache.CacheConfig", "vllm.config.vllm.VllmConfig")
)
COMPILED = ("__init__", "__signature__", "__pydantic_")


def is_name(attribute: str) -> bool:
    owner, _, name = attribute.rpartition(".")
    return owner in NAMES and name.startswith(COMPILED)


def wrapped(found: list[str]) -> set[str]:
    """Return the replaced attributes that are not the names of dtypes."""
    return {name for name in found if not is_name(name)}


def test_an_engine_with_vllms_own_dtypes_has_no_replaced_attribute() -> None:
    told = vllm_attributes.replaced(("auto", "fp8", "bfloat16"))
    assert wrapped(told.registered) == set()
    assert wrapped(told.configured) == set()
    assert wrapped(vllm_attributes.replaced(**told.environment).registered) == set()


def test_the_first_use_of_our_dtype_wraps_vllm_in_this_and_later_processes() -> None:
    told = vllm_attributes.replaced(("auto", "k4v4"))
    assert wrapped(told.registered) == set()
    assert "vllm.platforms.cpu.CpuPlatform.get_attn_backend_cls" in told.configured
    assert "vllm.v1.worker.worker_base.WorkerWrapperBase.initialize_from_config" in told.configured
    assert wrapped(vllm_attributes.replaced(**told.environment).registered) == wrapped(told.configured)


@pytest.mark.parametrize(("dtype", "wraps"), [("k4v4", True), ("int8", False), ("mla8", False)])
def test_only_a_dtype_with_residuals_wraps_the_scheduler(dtype: str, wraps: bool) -> None:
    found = wrapped(vllm_attributes.replaced(**{plugin.DTYPE: dtype}).registered)
    assert "vllm.platforms.cpu.CpuPlatform.get_attn_backend_cls" in found
    names = ("sched.scheduler.Scheduler.__init__", "Scheduler.schedule", "WorkerWrapperBase.execute_model")
    assert [any(one.endswith(name) for one in found) for name in names] == [wraps] * 3


@pytest.mark.parametrize(
    ("variable", "value", "wraps", "leaves"),
    [
        (options.SERVE, "1", "kv_cache_manager.KVCacheManager.get_computed_blocks", "CpuPlatform.get_attn_backend_cls"),
        (options.SERVE, "1", "core.EngineCoreProc._handle_shutdown", "WorkerWrapperBase.initialize_from_config"),
        (plugin.DTYPE, "k4v4", "CpuPlatform.get_attn_backend_cls", "EngineCoreProc._handle_shutdown"),
    ],
)
def test_our_options_wrap_only_the_functions_that_they_need(variable: str, value: str, wraps: str, leaves: str) -> None:
    found = wrapped(vllm_attributes.replaced(**{variable: value}).registered)
    assert any(name.endswith(wraps) for name in found)
    assert not any(name.endswith(leaves) for name in found)


def test_if_our_dtypes_cannot_be_registered_vllms_own_still_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin.log, "propagate", True)
    monkeypatch.setattr(plugin.compat, "make_known", lambda *_: (_ for _ in ()).throw(TypeError("another registry")))
    plugin.register()
    assert "No dtype of kvpilot can be chosen" in caplog.text
    assert "another registry" in caplog.text
    assert cache.CacheConfig(cache_dtype="auto").cache_dtype == "auto"


class Stock:
    """Functions of each kind. They have more parameters than our wrappers name."""

    def method(self, known: int, later: int = 0, *, named: str = "") -> tuple[Any, ...]:
        return "method", known, later, named

    @classmethod
    def of_class(cls, known: int, later: int = 0, *, named: str = "") -> tuple[Any, ...]:
        return cls.__name__, known, later, named

    @staticmethod
    def static(known: int, later: int = 0, *, named: str = "") -> tuple[Any, ...]:
        return "static", known, later, named


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Stock]]:
    """Yield the class `Stock`, and restore it afterwards."""
    for name in ("method", "of_class", "static"):
        monkeypatch.setattr(Stock, name, vars(Stock)[name])
    yield Stock


def ours(stock: Any, *args: Any, **kwargs: Any) -> Any:
    return ("ours", *stock(*args, **kwargs))


@pytest.mark.parametrize(("name", "who"), [("method", "method"), ("of_class", "Stock"), ("static", "static")])
def test_a_wrapper_passes_on_arguments_that_it_does_not_know(name: str, who: str, stock: type[Stock]) -> None:
    for _ in range(2):
        wrap(f"{__name__}:Stock.{name}", ours)
    assert getattr(stock(), name)(1, 2, named="x") == ("ours", who, 1, 2, "x"), "wrapped once"
    assert getattr(stock(), name)(known=1, later=2) == ("ours", who, 1, 2, "")
    assert list(inspect.signature(getattr(stock(), name)).parameters) == ["known", "later", "named"]


def test_two_wrappers_of_one_function_are_both_called_once(stock: type[Stock]) -> None:
    def another(stock: Any, *args: Any, **kwargs: Any) -> Any:
        return ("another", *stock(*args, **kwargs))

    for _ in range(2):
        wrap(f"{__name__}:Stock.method", ours)
        wrap(f"{__name__}:Stock.method", another)
    assert stock().method(1) == ("another", "ours", "method", 1, 0, "")


@pytest.mark.parametrize("from_connector", [False, True])
def test_our_lookup_of_cached_blocks_passes_on_additional_arguments(
    from_connector: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 passes a second argument that limits the hit. Without it every engine crashed at its first request."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def get_computed_blocks(self: Any, request: Any, max_cache_hit_length: int | None = None, *, more: int = 0) -> Any:
        return request.skip_reading_prefix_cache, max_cache_hit_length, more

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", get_computed_blocks)
    host.heed_from_connector()
    manager = object.__new__(KVCacheManager)
    request = SimpleNamespace(kv_transfer_params={host.FROM_CONNECTOR: from_connector}, skip_reading_prefix_cache=False)
    assert manager.get_computed_blocks(request, 7, more=3) == (from_connector, 7, 3)
    assert manager.get_computed_blocks(request=request, max_cache_hit_length=7) == (from_connector, 7, 0)
    assert request.skip_reading_prefix_cache is False


def wrappers() -> dict[str, ast.FunctionDef]:
    """Return each function that the package passes to `wrap`, by file and name."""
    found = {}
    for file in FILES:
        tree = ast.parse(file.read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "wrap":
                assert isinstance(node.args[1], ast.Name), f"{file.name}: {ast.unparse(node)}"
                found[f"{file.name}:{node.args[1].id}"] = functions[node.args[1].id]
    return found


@pytest.mark.parametrize("name", wrappers())
def test_every_wrapper_passes_on_all_arguments(name: str) -> None:
    function = wrappers()[name]
    assert function.args.args[0].arg == "stock"
    assert (function.args.vararg and function.args.vararg.arg) == "args"
    assert (function.args.kwarg and function.args.kwarg.arg) == "kwargs"
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "stock":
            given = ast.unparse(call)
            assert given.endswith("*args, **kwargs)"), given
            known = [arg.arg for arg in function.args.args[1:]]
            assert len(call.args) == len(known) + 1, f"{given}: of {known}"


def put_on_objects() -> dict[str, ast.FunctionDef]:
    """Return each function of ours that the code assigns to an attribute of another object, by file and name."""
    found = {}
    for file in FILES:
        tree = ast.parse(file.read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign):
                continue
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
            for target, value in pairs:
                if isinstance(target, ast.Attribute) and isinstance(value, ast.Name) and value.id in functions:
                    found[f"{file.name}:{value.id}"] = functions[value.id]
    return found


@pytest.mark.parametrize("name", put_on_objects())
def test_every_function_that_we_attach_to_vllms_objects_accepts_all_arguments(name: str) -> None:
    function = put_on_objects()[name]
    assert function.args.vararg, name
    assert function.args.kwarg, name


def not_taken(ours: Any, theirs: Any) -> list[str]:
    """Return the parameters of vLLM's method that our override does not accept."""
    own = inspect.signature(ours).parameters.values()
    kinds = {parameter.kind for parameter in own}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        return []
    named = {parameter.name for parameter in own} | {"args", "kwargs"}
    return [name for name in inspect.signature(theirs).parameters if name not in named]


def overrides(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the methods of a module's classes, except constructors, each with the vLLM method that it overrides."""
    for cls in vars(module).values():
        if not isinstance(cls, type) or cls.__module__ != module.__name__:
            continue
        for name, held in vars(cls).items():
            theirs = next((vars(base)[name] for base in cls.__mro__[1:]
                           if name in vars(base) and base.__module__.startswith("vllm.")), None)  # fmt: skip
            pair = [getattr(one, "__func__", one) for one in (held, theirs)]
            if name != "__init__" and all(map(inspect.isfunction, pair)):
                yield f"{cls.__name__}.{name}", *pair


OVERRIDING = ("backends.cpu", "backends.latent_cpu", "backends.packed", "recent.residual_pool",
              "transfer.host_copies", "transfer.nixl_connector")  # fmt: skip


@pytest.mark.parametrize("module", OVERRIDING)
def test_an_override_accepts_all_arguments_of_vllms_own_method(module: str) -> None:
    found = list(overrides(importlib.import_module(f"kvpilot_runtime.{module}")))
    lacking = {name: missing for name, ours, theirs in found if (missing := not_taken(ours, theirs))}
    assert not lacking


def test_functions_of_vllm_are_replaced_only_by_wrap() -> None:
    """Check that our code assigns no attribute of a name imported from vLLM."""
    for file in FILES:
        tree = ast.parse(file.read_text())
        theirs = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
            for alias in node.names
        }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                while isinstance(target, ast.Attribute):
                    target = target.value
                    owner = target.id if isinstance(target, ast.Name) else ""
                    assert owner not in theirs, f"{file.name}:{node.lineno}: {ast.unparse(node)}"


def test_a_wrapped_function_has_a_mark() -> None:
    plugin.serve_dtype("k4v4")
    module = importlib.import_module("vllm.platforms.cpu")
    assert getattr(module.CpuPlatform.get_attn_backend_cls.__func__, MARK)
