"""Schemas of functions, their arguments, and calls of functions and of an MCP server."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Optional

import psutil
import pytest

from tests.support.tool_calls import CALCULATOR
from trueline.environments.tools.schemas import UnfitTool, schema_of, wrong_arguments
from trueline.environments.tools.toolbox import Toolbox
from trueline.usercode.failures import NoSuchFunction, PolicyError, ToolRaised

TOOLS = '''
import sys

from trueline.environments.tools.interpreter import EPISODE
from trueline.usercode.failures import PolicyError

def exact(text: str) -> str:
    """Return a text; a reward has the same name."""
    return f"{text} in {EPISODE.get()}"

async def later(values: list[int]) -> dict:
    """Return values."""
    return {"values": values, "of": "ä"}

def stop(how: str) -> str:
    """End in some way."""
    if how == "exit":
        sys.exit(3)
    if how == "mistake":
        raise PolicyError("not like this")
    return {}[how] if how == "key" else next(iter(()))

async def leave() -> None:
    """Leave the process."""
    sys.exit(3)

def undocumented(a: int) -> int:
    return a
'''
SERVER = '''
import os

from mcp.server import MCPServer

server = MCPServer("numbers", log_level="CRITICAL")

@server.tool()
def double(number: int) -> int:
    """Double a number."""
    return 2 * number

@server.tool()
def environment(name: str) -> str:
    """Return a variable."""
    return os.environ.get(name, "")

server.run("stdio")
'''


def booked(
    title: str,
    pages: int,
    price: float,
    kind: Literal["novel", "poem"],
    tags: list[str],
    ratings: dict[str, int],
    other: dict,
    anything: Any,
    size: int | str,
    note: str | None = None,
    rows: Optional[list[list[int]]] = None,  # noqa: UP045  (as users write it)
    *,
    lent: bool = False,
) -> str:
    """Book a book,
    once.

    It is not bought.

    Args:
        title: Its title,
            in full: all of it.
        pages (int): How many.
        lent: Whether it is lent.

    Returns:
        title: not an argument.
    """
    return title


def bare(a: int, b) -> int:  # type: ignore[no-untyped-def]
    """Add."""
    return a + int(b)


def odd(a: bytes) -> int:
    """Count."""
    return len(a)


def many(*values: int) -> int:
    """Add."""
    return sum(values)


def silent(a: int) -> int:
    return a


def test_the_schema_of_every_kind_of_hint() -> None:
    assert schema_of(booked) == {
        "type": "function",
        "function": {
            "name": "booked",
            "description": "Book a book, once.",
            "parameters": {
                "type": "object",
                "properties": {
                    "title": {"type": "string", "description": "Its title, in full: all of it."},
                    "pages": {"type": "integer", "description": "How many."},
                    "price": {"type": "number"},
                    "kind": {"type": "string", "enum": ["novel", "poem"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "ratings": {"type": "object", "additionalProperties": {"type": "integer"}},
                    "other": {"type": "object"},
                    "anything": {},
                    "size": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                    "note": {"type": "string", "nullable": True},
                    "rows": {
                        "type": "array",
                        "items": {"type": "array", "items": {"type": "integer"}},
                        "nullable": True,
                    },
                    "lent": {"type": "boolean", "description": "Whether it is lent."},
                },
                "required": [*("title", "pages", "price", "kind", "tags", "ratings", "other", "anything", "size")],
            },
        },
    }


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (bare, r"the tool bare: its parameter b has no type hint: give it one of str, int"),
        (odd, r"the tool odd: its parameter a has the type hint <class 'bytes'>, which JSON has no value for: use str"),
        (many, r"the tool many: its parameter values cannot be given by its name"),
        (silent, r"the tool silent has no docstring"),
    ],
)
def test_a_function_that_a_model_cannot_be_told_of(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schema_of(function)


RIGHT: dict[str, Any] = {
    **{"title": "t", "pages": 1, "price": 2, "kind": "poem", "tags": ["a"], "ratings": {"a": 1}, "other": {"a": []}},
    **{"anything": None, "size": "small"},
}


@pytest.mark.parametrize("more", [{}, {"note": None, "rows": [[1], []], "lent": True}, {"price": 2.5, "size": 3}])
def test_right_arguments(more: dict[str, Any]) -> None:
    assert wrong_arguments(schema_of(booked), {**RIGHT, **more}) == ""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"title": 3}, "the argument 'title' must be string, not 3"),
        ({"title": None}, "the argument 'title' must be string, not null"),
        ({"pages": "3"}, "the argument 'pages' must be integer, not \"3\""),
        ({"pages": 3.0}, "the argument 'pages' must be integer, not 3.0"),
        ({"pages": True}, "the argument 'pages' must be integer, not true"),
        ({"price": "2"}, "the argument 'price' must be number"),
        ({"kind": "play"}, 'the argument \'kind\' must be one of ["novel", "poem"], not "play"'),
        ({"tags": "a"}, "the argument 'tags' must be array of string"),
        ({"tags": ["a", 1]}, "the argument 'tags' must be array of string"),
        ({"ratings": {"a": "b"}}, "the argument 'ratings' must be object"),
        ({"size": 1.5}, "the argument 'size' must be integer or string"),
        ({"rows": [1]}, "the argument 'rows' must be array of array of integer or null"),
        ({"lent": 1}, "the argument 'lent' must be boolean"),
        ({"colour": 1}, "there is no argument 'colour'"),
    ],
)
def test_wrong_arguments_are_told_to_the_model(more: dict[str, Any], said: str) -> None:
    assert said in wrong_arguments(schema_of(booked), {**RIGHT, **more})


def test_missing_arguments_are_all_told() -> None:
    said = wrong_arguments(schema_of(booked), {"title": "t", "extra": 1})
    assert "the argument 'pages' is missing; the argument 'price' is missing" in said
    assert said.endswith("lent (boolean).")


# Calls


@pytest.fixture
def tools(tmp_path: Path) -> str:
    file = tmp_path / "my_tools.py"
    file.write_text(TOOLS)
    return str(file)


def call(box: Toolbox, name: str, arguments: dict[str, Any]) -> str:
    return asyncio.run(box.call("one", name, arguments))


def test_functions_of_a_file_are_called(tools: str) -> None:
    box = Toolbox([f"{tools}:exact", f"{tools}:later", CALCULATOR], {})
    assert [schema["function"]["name"] for schema in box.describe()["schemas"]] == ["exact", "later", "calculator"]
    assert call(box, "exact", {"text": "a"}) == "a in one"
    assert call(box, "later", {"values": [1]}) == '{"values": [1], "of": "ä"}'
    assert call(box, "calculator", {"expression": "1 + 1"}) == "2"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("exactly", {}, "There is no tool 'exactly'; there are exact, stop."),
        ("exact", {}, "the argument 'text' is missing"),
        ("exact", {"text": 3}, "must be string"),
        ("stop", {"how": "mistake"}, "not like this"),
    ],
)
def test_the_policys_mistakes(tools: str, name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        call(Toolbox([f"{tools}:exact", f"{tools}:stop"], {}), name, arguments)


def test_users_tools_are_known_from_built_in_ones(tools: str) -> None:
    """What they raise is told to the model; what ours raise is a failure."""
    assert Toolbox(["python", f"{tools}:exact", f"{tools}:later"], {}).users == {"exact", "later"}


def test_what_a_tool_raises_comes_through(tools: str) -> None:
    box = Toolbox([f"{tools}:stop", f"{tools}:leave"], {})
    for name, arguments, said in (
        ("stop", {"how": "key"}, "KeyError: "),
        ("stop", {"how": "exit"}, r"the tool raised SystemExit\(3\)"),
        ("stop", {"how": "next"}, r"the tool raised StopIteration\(\)"),
        ("leave", {}, r"the tool raised SystemExit\(3\)"),
    ):
        with pytest.raises(ToolRaised, match=said):
            call(box, name, arguments)


@pytest.mark.parametrize(
    ("specifications", "options", "kind", "message"),
    [
        (["math"], {}, NoSuchFunction, r"'math' is neither python, file.py:function, package"),
        (["TOOLS:none"], {}, NoSuchFunction, "has no function 'none'; it has .*exact"),
        (["TOOLS:PolicyError"], {}, NoSuchFunction, "is no function but <class"),
        (["TOOLS:undocumented"], {}, ValueError, "the tool undocumented has no docstring"),
        (["python", "python"], {}, ValueError, "there is a tool 'python' already"),
        (["search"], {}, ValueError, r"the tool search is an example, no built-in: copy examples/tools/search.py "),
        (
            ["python"],
            {"second": 1},
            ValueError,
            r"options\.second: none of the tools has such an option; they take seconds, memory",
        ),
        (["mcp:no-such-command"], {}, UnfitTool, "the MCP server 'no-such-command' does not answer"),
    ],
)
def test_tools_that_there_are_not(
    tools: str, specifications: list[str], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Toolbox([one.replace("TOOLS", tools) for one in specifications], options)


# MCP


def test_an_mcp_server_that_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    McpServer = pytest.importorskip("trueline.environments.tools.mcp_servers").McpServer
    monkeypatch.setenv("A_KEY", "of a service")
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    before = set(psutil.Process().children(recursive=True))
    box = Toolbox([f"mcp:{sys.executable} {server}", CALCULATOR], {})
    started = set(psutil.Process().children(recursive=True)) - before

    async def play() -> None:
        functions = [schema["function"] for schema in box.describe()["schemas"]]
        assert [function["name"] for function in functions] == ["double", "environment", "calculator"]
        assert functions[0]["description"] == "Double a number."
        assert functions[0]["parameters"]["required"] == ["number"]
        assert await asyncio.gather(*(box.call("one", "double", {"number": n}) for n in (1, 2))) == ["2", "4"]
        assert await box.call("one", "environment", {"name": "A_KEY"}) == "of a service"
        with pytest.raises(PolicyError, match="number"):
            await box.call("one", "double", {"number": "two"})
        await box.close("one")
        for one in box.holders:
            assert isinstance(one, McpServer)
            one.stop()

    asyncio.run(play())
    assert len(started) == 1
    assert not [process for process in started if process.is_running()]
