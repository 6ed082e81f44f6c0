"""What replies can be held to while they are sampled: JSON of a schema, and calls of tools."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trueline.data.messages import Tool
from trueline.environments.base import Structure
from trueline.environments.tools.calls import Spelling

Schema = dict[str, Any]
DEFINITIONS = "#/$defs/"  # where a schema keeps what it refers to


@dataclass(frozen=True, slots=True)
class Structures:
    """What the engines of a run can hold replies to."""

    spelling: Spelling | None  # of calls; None: in a format that is no JSON
    problem: Callable[[Structure], str]  # why they would refuse one, or nothing

    def of(self, schema: Schema | None, forced: list[Tool]) -> Structure:
        """Return the structure of JSON by a schema, or of a call to one of these tools."""
        if schema is not None:
            return Structure(json.dumps(schema))
        assert self.spelling is not None
        return Structure(json.dumps(call_schema(forced, self.spelling)), self.spelling.begin, self.spelling.end)


def call_schema(tools: list[Tool], spelling: Spelling) -> Schema:
    """Return the schema of a call to one of the tools; what theirs define moves to the outermost place."""
    calls: list[Schema] = []
    definitions: Schema = {}
    for at, tool in enumerate(tools):
        function, own = tool["function"], f"{DEFINITIONS}{at}."
        text = json.dumps(function.get("parameters") or {"type": "object"})
        parameters = json.loads(text.replace(f'"{DEFINITIONS}', f'"{own}'))
        definitions |= {f"{at}.{name}": value for name, value in parameters.pop("$defs", {}).items()}
        fields = {"name": {"const": function["name"]}, spelling.arguments: parameters}
        calls.append({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})
    return {"anyOf": calls} | ({"$defs": definitions} if definitions else {})
