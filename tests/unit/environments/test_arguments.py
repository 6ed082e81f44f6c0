"""Arguments that models write as texts, read as the schemas of tools want them."""

import json
from typing import Any

import pytest

from trueline.data.messages import Tool
from trueline.environments.tools.schemas import coerce_arguments, schema_of, wrong_arguments

INTEGER = {"type": "integer"}


def tool_of(schema: Any) -> Tool:
    definitions = {"Count": INTEGER, "Tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Tree"}}}}
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": definitions, "required": []}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (INTEGER, "12", 12),
        (INTEGER, " -3\n", -3),
        (INTEGER, "12.0", 12),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "number"}, "3", 3),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "object"}, '{"x": [1, "2"]}', {"x": [1, "2"]}),
        ({"type": "object"}, "{'x': None}", {"x": None}),
        ({"type": "array", "items": INTEGER}, '["1", 2]', [1, 2]),
        ({"type": "array", "items": {"$ref": "#/$defs/Count"}}, ["1"], [1]),
        ({"properties": {"n": INTEGER}, "type": "object"}, {"n": "1", "m": "1"}, {"n": 1, "m": "1"}),
        ({"type": "object", "additionalProperties": {"type": "number"}}, {"m": "0.5"}, {"m": 0.5}),
        ({"anyOf": [INTEGER, {"type": "null"}]}, "5", 5),
        ({"anyOf": [INTEGER, {"type": "array", "items": INTEGER}]}, '["5"]', [5]),
        ({"enum": [1, 2]}, "2", 2),
        ({"$ref": "#/$defs/Tree"}, '{"next": {"next": {}}}', {"next": {"next": {}}}),
    ],
)
def test_texts_that_can_be_read(schema: Any, text: Any, value: Any) -> None:
    found = coerce_arguments({"a": text}, tool_of(schema))["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "12"),
        ({"type": "string"}, "null"),
        ({"anyOf": [{"type": "string"}, INTEGER]}, "12"),
        ({"enum": ["1", "2"]}, "1"),
        ({}, "12"),
        (None, "12"),
        (True, "12"),
        (INTEGER, "twelve"),
        (INTEGER, "12.5"),
        (INTEGER, "true"),
        (INTEGER, 12.5),
        (INTEGER, "9" * 5000),
        ({"type": "number"}, "NaN"),
        ({"type": "number"}, "1e999"),
        ({"type": "boolean"}, "1"),
        ({"type": "object"}, "[1]"),
        ({"type": "array"}, "[" * 100_000),
        ({"type": 3, "enum": 4, "anyOf": 5}, "12"),
        ({"$ref": "#/$defs/None"}, "12"),
        ({"$ref": "elsewhere"}, "12"),
        ({"type": "string"}, 12),
    ],
)
def test_what_is_right_or_cannot_be_read_stays(schema: Any, value: Any) -> None:
    assert coerce_arguments({"a": value}, tool_of(schema)) == {"a": value}


def test_a_schema_that_refers_to_itself_ends() -> None:
    tool = tool_of({"$ref": "#/properties/a"})
    assert coerce_arguments({"a": "12"}, tool) == {"a": "12"}


def test_tools_that_say_nothing_of_their_parameters() -> None:
    for tool in (None, {"type": "function", "function": {"name": "f"}}, {"function": {"parameters": []}}):
        assert coerce_arguments({"a": "12"}, tool) == {"a": "12"}


def test_what_cannot_be_read_is_told_to_the_model() -> None:
    def repeat(text: str, times: int, weights: list[float] | None = None) -> str:
        """Repeats a text."""
        return text * times

    schema = schema_of(repeat)
    written = {"text": "7", "times": "2", "weights": json.dumps([1, 2.5])}
    assert coerce_arguments(written, schema) == {"text": "7", "times": 2, "weights": [1, 2.5]}
    assert wrong_arguments(schema, coerce_arguments(written, schema)) == ""
    wrong = wrong_arguments(schema, coerce_arguments({"text": "7", "times": "two"}, schema))
    assert "the argument 'times' must be integer, not \"two\"" in wrong
