"""The tools of a run, in the process that has loaded them; the module imports fast and without torch."""

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from trueline.data.messages import Tool
from trueline.environments.tools.calls import as_json
from trueline.environments.tools.contents import Part, shows_pictures, write_parts
from trueline.environments.tools.interpreter import EPISODE, PythonTool
from trueline.environments.tools.schemas import UnfitTool, schema_of, wrong_arguments
from trueline.monitoring.user_files import PICKLED
from trueline.usercode.failures import NoSuchFunction, PolicyError, ToolRaised, WrongResult
from trueline.usercode.loading import Function, Parameters, load_function

if TYPE_CHECKING:  # an extra, which takes a second to import
    from trueline.environments.tools.mcp_servers import McpServer

Arguments = dict[str, Any]
Run = Callable[[Arguments], Awaitable[Any]]

PYTHON, MCP = "python", "mcp:"
EXAMPLES = ("calculator", "search")
CONNECTIONS = ("auto", "episode", "shared")  # of MCP servers; auto: of each episode to a URL, shared to a command
MCP_OPTIONS = ("mcp_headers", "mcp_connection")


class Toolbox:
    """Tools by their names: Python, users' functions and those of MCP servers."""

    def __init__(self, specifications: list[str], options: dict[str, Any]) -> None:
        self.tools: dict[str, tuple[Tool, Run]] = {}
        self.users: set[str] = set()  # names of tools that are users' functions
        self.holders: list[PythonTool | McpServer] = []  # of state for episodes
        check_options(specifications, options)
        for specification in specifications:
            for schema, run in self._load(specification, options):
                name = schema["function"]["name"]
                if name in self.tools:
                    raise UnfitTool(f"the tool {specification}: there is a tool {name!r} already; rename one of them")
                self.tools[name] = schema, run

    def describe(self) -> dict[str, Any]:
        return {"plays": "tools", "schemas": [schema for schema, _ in self.tools.values()], "required": []}

    async def call(self, episode: str, name: str, arguments: Arguments, sees: bool = True) -> str | list[Part]:
        """Return a tool's result as text or parts, or raise PolicyError, or ToolRaised where a user's tool fails."""
        if name not in self.tools:
            raise PolicyError(f"There is no tool {name!r}; there are {', '.join(self.tools)}.")
        EPISODE.set(episode)
        try:
            result = await self.tools[name][1](arguments)
            if shows_pictures(result) and not sees and name not in self.users:  # the choice of a server's author
                return "\n".join(part if isinstance(part, str) else "[image]" for part in result)
            if shows_pictures(result):
                return write_parts(result, f"what the tool {name!r} returned")
            return result if isinstance(result, str) else as_json(result)
        except Exception as error:
            if name not in self.users or isinstance(error, PolicyError | WrongResult):
                raise
            traceback.print_exception(error)  # into the log; the model gets its last line
            raise ToolRaised("".join(traceback.format_exception_only(error)).strip()) from error

    async def close(self, episode: str) -> None:
        """End what the tools hold for an episode."""
        for holder in self.holders:
            await holder.close(episode)

    def _load(self, specification: str, options: dict[str, Any]) -> list[tuple[Tool, Run]]:
        if specification.startswith(MCP):
            server = connect_server(specification.removeprefix(MCP).strip(), options)
            self.holders.append(server)
            if not server.schemas:
                raise UnfitTool(f"the MCP server {server.address.text!r} offers no tools: check it, or leave it out")
            return [(schema, partial(server.call, schema["function"]["name"])) for schema in server.schemas]
        if specification == PYTHON:
            python = PythonTool(**{name: value for name, value in options.items() if name not in MCP_OPTIONS})
            self.holders.append(python)
            function: Function = python.python
        else:
            function = load_tool(specification)
            self.users.add(function.__name__)
        schema = schema_of(function)
        return [(schema, partial(call_tool, function, schema))]


async def call_tool(function: Function, schema: Tool, arguments: Arguments) -> Any:
    if wrong := wrong_arguments(schema, arguments):
        raise PolicyError(wrong)
    try:
        return await call_user(function, **arguments)
    except SystemExit as error:  # it would end the loop, and all other episodes
        raise RuntimeError(f"the tool raised {error!r}") from error


async def call_user(function: Function, /, *args: Any, **named: Any) -> Any:
    """Call a plain function in a thread, and await a coroutine function."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **named)

    def call_contained() -> Any:
        try:
            return function(*args, **named)
        except (SystemExit, StopIteration) as error:  # a caller would wait forever for a future with a StopIteration
            raise RuntimeError(f"the tool raised {error!r}") from error

    returned = await asyncio.to_thread(call_contained)
    return await returned if inspect.isawaitable(returned) else returned


def check_options(specifications: list[str], options: dict[str, Any]) -> None:
    known = Parameters.of(PythonTool).names if PYTHON in specifications else []
    known += MCP_OPTIONS if any(one.startswith(MCP) for one in specifications) else ()
    if (kind := options.get("mcp_connection", "auto")) not in CONNECTIONS:
        raise UnfitTool(f"environment.options.mcp_connection={kind!r}: take one of {', '.join(CONNECTIONS)}")
    if unknown := [option for option in options if option not in known]:
        takes = f"they take {', '.join(known) or 'none'}"
        raise UnfitTool(f"environment.options.{unknown[0]}: none of the tools has such an option; {takes}")


def load_tool(name: str) -> Function:
    if name in EXAMPLES:
        remedy = f"copy examples/tools/{name}.py from the repository, and name it as --tools {name}.py:{name}"
        raise NoSuchFunction(f"the tool {name} is an example, no built-in: {remedy}")
    if ":" not in name and not name.endswith(PICKLED):
        forms = f"{PYTHON}, file.py:function, package.module:function, mcp:URL nor mcp:COMMAND"
        remedy = "name one function of a file, or several with commas"
        raise NoSuchFunction(f"the tool {name!r} is neither {forms}: {remedy}")
    function = load_function(name, {})
    if not inspect.isroutine(function):
        raise NoSuchFunction(f"the tool {name} is no function but {function!r:.100}: give a function")
    return function


def connect_server(address: str, options: dict[str, Any]) -> "McpServer":
    try:
        from trueline.environments.tools.mcp_servers import McpServer, ServerGone  # noqa: PLC0415
    except ModuleNotFoundError:
        raise UnfitTool("tools of MCP servers need a package: pip install 'trueline[mcp]'") from None
    if not address:
        raise UnfitTool("an MCP server is named by mcp:URL or mcp:COMMAND, here neither follows mcp:")
    try:
        return McpServer(address, options.get("mcp_headers", {}), options.get("mcp_connection", "auto"))
    except ServerGone as error:
        raise UnfitTool(str(error)) from None
