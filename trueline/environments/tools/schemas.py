"""The schemas of functions that a model may call, and the arguments of its calls."""

import ast
import inspect
import json
import math
import re
import textwrap
import typing
from types import NoneType, UnionType
from typing import Any, Literal, Union

from trueline.data.messages import Tool
from trueline.environments.tools.calls import LONGEST_QUOTE, as_json
from trueline.usercode.failures import NoSuchFunction
from trueline.usercode.loading import Function

Schema = dict[str, Any]

KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
TYPES: dict[str, tuple[type, ...]] = {name: (kind,) for kind, name in KINDS.items()} | {"number": (int, float)}
HINTS = "str, int, float, bool, list[...], dict, Literal[...] and unions of them"
ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:(.*)")
MOST_REFERENCES = 20  # nested, because a schema may refer to itself
IMPLIED = {"properties": "object", "items": "array"}  # by a key of a schema that names no type
NOTHING = ("null", "None")  # as templates write it


class UnfitTool(NoSuchFunction):
    """A tool that cannot be offered to a model."""


def schema_of(function: Function) -> Tool:
    """Return a function's schema, from its type hints and its docstring in Google's style."""
    name = function.__name__
    description, texts = parse_docstring(inspect.getdoc(function) or "")
    if not description:
        raise UnfitTool(f"the tool {name} has no docstring, by which a model knows what it does: write one")
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    properties: Schema = {}
    for one in parameters:
        place, hint = f"the tool {name}: its parameter {one.name}", hints.get(one.name)
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise UnfitTool(f"{place} cannot be given by its name: declare each parameter without * and /")
        if hint is None:
            raise UnfitTool(f"{place} has no type hint: give it one of {HINTS}")
        try:
            properties[one.name] = schema_of_hint(hint)
        except TypeError:
            raise UnfitTool(f"{place} has the type hint {hint}, which JSON has no value for: use {HINTS}") from None
        properties[one.name] |= {"description": texts[one.name]} if one.name in texts else {}
    required = [one.name for one in parameters if one.default is one.empty]
    described = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": described}}


def schema_of_hint(hint: Any) -> Schema:
    """Return a type as JSON schema, with `nullable` as chat templates know it, or raise TypeError."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in KINDS:
        return {"type": KINDS[hint]}
    if origin is Literal and type(inner[0]) in KINDS:
        return {"type": KINDS[type(inner[0])], "enum": list(inner)}
    if origin in (list, dict):
        inside = "items" if origin is list else "additionalProperties"
        return {"type": KINDS[origin], inside: schema_of_hint((inner or [Any])[-1])}
    if origin in (Union, UnionType):
        kinds = [schema_of_hint(one) for one in inner if one is not NoneType]
        schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        return {**schema, "nullable": True} if NoneType in inner else schema
    raise TypeError(hint)


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's first paragraph, and its text for each argument."""
    before, *after = re.split(r"^Args:[ \t]*\n", text, maxsplit=1, flags=re.MULTILINE)
    indented = re.match(r"(?:[ \t]+.*\n?|\n)*", after[0])[0] if after else ""  # type: ignore[index]  # it matches all
    texts: dict[str, str] = {}
    for line in textwrap.dedent(indented).splitlines():
        if entry := ARGUMENT.match(line):
            name, texts[entry[1]] = entry[1], entry[2].strip()
        elif texts:
            texts[name] = f"{texts[name]} {line.strip()}".strip()
    return " ".join(before.strip().partition("\n\n")[0].split()), texts


def wrong_arguments(schema: Tool, arguments: dict[str, Any]) -> str:
    """Return what is wrong with arguments, for the model; empty if nothing is."""
    name, parameters = schema["function"]["name"], schema["function"]["parameters"]
    properties = parameters["properties"]
    wrong = [f"the argument {one!r} is missing" for one in parameters["required"] if one not in arguments]
    wrong += [f"there is no argument {one!r}" for one in arguments if one not in properties]
    wrong += [
        f"the argument {one!r} must be {describe_schema(properties[one])}, not {as_json(value):.{LONGEST_QUOTE}}"
        for one, value in arguments.items()
        if one in properties and not fits(value, properties[one])
    ]
    takes = ", ".join(f"{one} ({describe_schema(kind)})" for one, kind in properties.items()) or "no arguments"
    return f"Wrong call of {name}: {'; '.join(wrong)}. It takes {takes}." if wrong else ""


def describe_schema(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(map(describe_schema, schema["anyOf"]))
    kind = f"one of {as_json(schema['enum'])}" if "enum" in schema else schema.get("type", "any value")
    of = f" of {describe_schema(schema['items'])}" if "items" in schema else ""
    return f"{kind}{of}" + (" or null" if schema.get("nullable") else "")


def fits(value: Any, schema: Schema) -> bool:
    """Return whether a value fits a schema; unlike in Python, true and false are no numbers."""
    if value is None:
        return bool(schema.get("nullable", not schema))
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    inner: list[Any] = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    of: Schema = schema.get("items") or schema.get("additionalProperties") or {}
    return ("type" not in schema or type(value) in TYPES[schema["type"]]) and all(fits(one, of) for one in inner)


def coerce_arguments(arguments: dict[str, Any], tool: Tool | None) -> dict[str, Any]:
    """Return arguments with texts read as what the tool's schema wants; what cannot be read stays a text.

    The schema may be any, of an MCP server or an agent: what is unknown in it wants nothing.
    """
    root = (tool or {}).get("function", {}).get("parameters")
    value = coerce(arguments, root, root) if isinstance(root, dict) else arguments
    return value if isinstance(value, dict) else arguments


def coerce(value: Any, schema: Any, root: Schema) -> Any:
    options = alternatives(schema, root)
    kinds = {kind for option in options for kind in kinds_of(option)}
    if isinstance(value, str) and kinds:
        value = read_as(value, kinds)
    inner = next((option for option in options if kind_of(value) in kinds_of(option)), {})
    if isinstance(value, dict):
        named, others = inner.get("properties"), inner.get("additionalProperties")
        named = named if isinstance(named, dict) else {}
        return {name: coerce(one, named.get(name, others), root) for name, one in value.items()}
    return [coerce(one, inner.get("items"), root) for one in value] if isinstance(value, list) else value


def alternatives(schema: Any, root: Schema, depth: int = 0) -> list[Schema]:
    """Return what a schema allows, references and unions resolved."""
    if not isinstance(schema, dict) or depth > MOST_REFERENCES:
        return []
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = root
        for name in reference.removeprefix("#/").split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        return alternatives(found, root, depth + 1)
    unions = [schema[union] for union in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(union), list)]
    return [schema, *(inner for union in unions for one in union for inner in alternatives(one, root, depth + 1))]


def kinds_of(schema: Schema) -> set[str]:
    kind = schema.get("type")
    named = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    allowed = schema["enum"] if isinstance(schema.get("enum"), list) else []
    kinds = {one for one in named if isinstance(one, str)} or {kind_of(one) for one in allowed}
    kinds = kinds or {kind for key, kind in IMPLIED.items() if key in schema}
    return kinds | ({"null"} if schema.get("nullable") is True else set())


def kind_of(value: Any) -> str:
    return "null" if value is None else KINDS.get(type(value), "")


def read_as(text: str, kinds: set[str]) -> Any:
    """Return a text as the first of these kinds that it can be read as; where text is wanted, it is text."""
    if "null" in kinds and text.strip() in NOTHING:
        return None
    if "string" in kinds:
        return text
    for read in (json.loads, ast.literal_eval):  # templates write objects in JSON, some in Python
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, float) and not math.isfinite(value):  # which JSON has no value for
            continue
        if isinstance(value, float) and value.is_integer() and "number" not in kinds:
            value = int(value)
        if kind_of(value) in kinds or (kind_of(value) == "integer" and "number" in kinds):
            return value
    return {"true": True, "false": False}.get(text.strip().lower(), text) if "boolean" in kinds else text
