"""Tools of MCP servers, which are reached by a URL or started by a command."""

import asyncio
import os
import shlex
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any

from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult, TextContent
from mcp.types import Tool as ServerTool

from trueline.environments.tools.calls import ToolMistake

if TYPE_CHECKING:  # that module needs torch, which the processes that host tools start without
    from trueline.data.messages import Tool

START_SECONDS, STOP_SECONDS = 60.0, 10.0


class Server:
    """A connection in a loop and a thread of its own, for one task must open it, hold it and close it."""

    def __init__(self, address: str) -> None:
        self.client = Client(address if address.startswith(("http://", "https://")) else command_of(address))
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._spin, daemon=True).start()
        self.leave = asyncio.Event()
        listed: Future[list[Tool]] = Future()
        self.held = asyncio.run_coroutine_threadsafe(self._hold(listed), self.loop)
        either: list[Future[Any]] = [listed, self.held]
        wait(either, START_SECONDS, FIRST_COMPLETED)
        if not listed.done():
            cause = self.held.exception() if self.held.done() else TimeoutError(f"nothing in {START_SECONDS:g} seconds")
            self.stop()
            raise RuntimeError(f"the MCP server {address!r} does not answer: check its URL or command") from cause
        self.schemas = listed.result()

    def _spin(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    async def _hold(self, listed: "Future[list[Tool]]") -> None:
        async with self.client:
            listed.set_result(await self._listed())
            await self.leave.wait()

    async def _listed(self) -> "list[Tool]":
        page = await self.client.list_tools()
        tools = page.tools
        while page.next_cursor is not None:
            page = await self.client.list_tools(cursor=page.next_cursor)
            tools = [*tools, *page.tools]
        return [described(tool) for tool in tools]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a tool's result as text; an error that the server reports is for the policy to see, as MCP has it."""
        asked = asyncio.run_coroutine_threadsafe(self.client.call_tool(name, arguments), self.loop)
        result = await asyncio.wrap_future(asked)
        if result.is_error:
            raise ToolMistake(text_of(result))
        return text_of(result)

    def stop(self) -> None:
        """Close the connection, and end a server that was started for it."""
        self.loop.call_soon_threadsafe(self.leave.set)
        wait([self.held], STOP_SECONDS)
        self.held.cancel()
        self.loop.call_soon_threadsafe(self.loop.stop)


def command_of(text: str) -> StdioServerParameters:
    """Return a server's command. It has this process's environment, in which keys for services are given."""
    command, *arguments = shlex.split(text)
    return StdioServerParameters(command=command, args=arguments, env=dict(os.environ))


def described(tool: ServerTool) -> "Tool":
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
    }


def text_of(result: CallToolResult) -> str:
    blocks = [block.text if isinstance(block, TextContent) else f"[{block.type}]" for block in result.content]
    return "\n".join(blocks)
