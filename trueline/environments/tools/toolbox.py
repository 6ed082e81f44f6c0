"""The tools of a run, for the process that hosts them; it imports in no time, and without torch."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from trueline.algorithms.user_functions import Function, NoSuchFunction, load_function
from trueline.environments.tools.built_in import BUILT_IN, EPISODE, BuiltIn
from trueline.environments.tools.calls import ToolMistake, as_json
from trueline.environments.tools.schemas import UnfitTool, schema_of, wrong_arguments
from trueline.monitoring.user_files import PICKLED

if TYPE_CHECKING:  # the first needs torch, which a process that hosts tools starts without; the second a second
    from trueline.data.messages import Tool
    from trueline.environments.tools.mcp_servers import Server

Arguments = dict[str, Any]
Run = Callable[[Arguments], Awaitable[Any]]

MCP = "mcp:"
CONNECTIONS = ("auto", "episode", "shared")  # of MCP servers; auto: of each episode to a URL, shared to a command
MCP_OPTIONS = ("mcp_headers", "mcp_connection")


class Toolbox:
    """Tools by their names: of built-in kinds, of users' modules and of MCP servers."""

    def __init__(self, specifications: list[str], options: dict[str, Any]) -> None:
        self.tools: dict[str, tuple[Tool, Run]] = {}
        self.users: set[str] = set()  # names of tools that are users' functions
        self.built_in: list[BuiltIn] = []
        self.servers: list[Server] = []
        self.open: set[str] = set()  # episodes
        check_options(specifications, options)
        for specification in specifications:
            for schema, run in self._loaded(specification, options):
                self._add(specification, schema, run)

    def schemas(self) -> "list[Tool]":
        return [schema for schema, _ in self.tools.values()]

    async def call(self, episode: str, name: str, arguments: Arguments) -> str:
        """Return a tool's result as text, or raise ToolMistake, or what the tool itself raises."""
        if name not in self.tools:
            raise ToolMistake(f"There is no tool {name!r}; there are {', '.join(self.tools)}.")
        EPISODE.set(episode)
        self.open.add(episode)
        result = await self.tools[name][1](arguments)
        return result if isinstance(result, str) else as_json(result)

    async def close(self, episode: str) -> None:
        """End what the tools hold for an episode."""
        self.open.discard(episode)
        for tool in self.built_in:
            await tool.close(episode)
        for server in self.servers:
            await server.close(episode)

    async def stop(self) -> None:
        """End what the tools hold, for single episodes and for all together."""
        for episode in list(self.open):
            await self.close(episode)
        for server in self.servers:
            await asyncio.to_thread(server.stop)

    def _add(self, specification: str, schema: "Tool", run: Run) -> None:
        name = schema["function"]["name"]
        if name in self.tools:
            raise UnfitTool(f"the tool {specification}: there is a tool {name!r} already; rename one of them")
        self.tools[name] = schema, run

    def _loaded(self, specification: str, options: dict[str, Any]) -> "list[tuple[Tool, Run]]":
        if specification.startswith(MCP):
            server = connected(specification.removeprefix(MCP).strip(), options)
            self.servers.append(server)
            if not server.schemas:
                raise UnfitTool(f"the MCP server {server.address.text!r} offers no tools: see to it, or leave it out")
            return [(schema, partial(server.call, schema["function"]["name"])) for schema in server.schemas]
        if specification in BUILT_IN:
            self.built_in.append(made(specification, options))
            function = self.built_in[-1].function
        else:
            function = load_tool(specification)
            self.users.add(schema_of(function)["function"]["name"])
        schema = schema_of(function)
        return [(schema, partial(self._run, function, schema))]

    async def _run(self, function: Function, schema: "Tool", arguments: Arguments) -> Any:
        if wrong := wrong_arguments(schema, arguments):
            raise ToolMistake(wrong)
        if inspect.iscoroutinefunction(function):
            return await guarded(function(**arguments))
        result = await asyncio.to_thread(contained, function, arguments)
        return await guarded(result) if inspect.isawaitable(result) else result


async def guarded(awaited: Awaitable[Any]) -> Any:
    try:
        return await awaited
    except SystemExit as error:  # which would end the loop, and all other episodes
        raise RuntimeError(f"the tool raised {error!r}") from error


def contained(function: Function, arguments: Arguments) -> Any:
    try:
        return function(**arguments)
    except (SystemExit, StopIteration) as error:  # no future can hold a StopIteration: whoever awaits it waits for ever
        raise RuntimeError(f"the tool raised {error!r}") from error


def check_options(specifications: list[str], options: dict[str, Any]) -> None:
    named = [name for name in specifications if name in BUILT_IN]
    known = [option for name in named for option in inspect.signature(BUILT_IN[name]).parameters]
    if any(one.startswith(MCP) for one in specifications):
        known += MCP_OPTIONS
    if (kind := options.get("mcp_connection", "auto")) not in CONNECTIONS:
        raise UnfitTool(f"environment.options.mcp_connection={kind!r}: take one of {', '.join(CONNECTIONS)}")
    for option in options:
        if option not in known:
            takes = f"they take {', '.join(known)}" if known else "they take none"
            raise UnfitTool(f"environment.options.{option}: none of the tools has such an option; {takes}")


def made(name: str, options: dict[str, Any]) -> BuiltIn:
    """Make a built-in tool with those options that are its own."""
    takes = inspect.signature(BUILT_IN[name]).parameters
    for option, parameter in takes.items():
        if parameter.default is parameter.empty and option not in options:
            raise UnfitTool(f"the tool {name} needs environment.options.{option}")
    return BUILT_IN[name](**{option: value for option, value in options.items() if option in takes})


def load_tool(specification: str) -> Function:
    if ":" not in specification and not specification.endswith(PICKLED):
        raise NoSuchFunction(
            f"the tool {specification!r} is not a built-in ({', '.join(BUILT_IN)}), nor file.py:function, "
            "package.module:function, mcp:URL or mcp:COMMAND: name one function of a file, or several with commas"
        )
    function = load_function(specification, {})
    if not inspect.isroutine(function):
        raise NoSuchFunction(f"the tool {specification} is no function but {function!r:.100}: give a function")
    return function


def connected(address: str, options: dict[str, Any]) -> "Server":
    try:
        from trueline.environments.tools.mcp_servers import (  # noqa: PLC0415  (an extra; a second to import)
            Server,
            ServerGone,
        )
    except ModuleNotFoundError:
        raise UnfitTool("tools of MCP servers need a package: pip install 'trueline[mcp]'") from None
    if not address:
        raise UnfitTool("an MCP server is named by mcp:URL or mcp:COMMAND, here neither follows mcp:")
    try:
        return Server(address, options.get("mcp_headers", {}), options.get("mcp_connection", "auto"))
    except ServerGone as error:
        raise UnfitTool(str(error)) from None
