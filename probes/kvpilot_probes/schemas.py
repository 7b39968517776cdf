"""Check the arguments of tool calls. The module supports the part of JSON Schema that tools commonly use."""

from collections.abc import Mapping

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def fault(schema: object, where: str = "parameters") -> str | None:
    """Return a description of the schema's first error, or None. Unknown keywords are allowed."""
    if not isinstance(schema, Mapping):
        return f"{where} must be a mapping"
    kinds = schema.get("type", [])
    unknown = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind not in list(_TYPES)]
    if unknown:
        return f"{where}.type: {str(unknown[0])[:40]!r} is not a type of JSON Schema; use {', '.join(_TYPES)}"
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        return f"{where}.enum must be a list of values"
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        return f"{where}.properties must be a mapping"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"{where}.required must be a list of names"
    missing = [name for name in required if name not in properties]
    if missing and properties:
        return f"{where}.required: {missing[0][:40]!r} is not in properties"
    inner = [(f"{where}.properties.{str(name)[:40]}", one) for name, one in properties.items()]
    inner += [(f"{where}.items", schema["items"])] if "items" in schema else []
    return next((found for name, one in inner if (found := fault(one, name)) is not None), None)


def matches(schema: object, value: object) -> bool:
    """Return True if a value follows a valid schema. Ignore unknown keywords."""
    if not isinstance(schema, Mapping):
        return True
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds and not any(_is(value, kind) for kind in kinds):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, Mapping):
        properties = schema.get("properties", {})
        return all(name in value for name in schema.get("required", [])) and all(
            matches(properties.get(name), one) for name, one in value.items()
        )
    return not isinstance(value, list) or all(matches(schema.get("items"), one) for one in value)


def _is(value: object, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
