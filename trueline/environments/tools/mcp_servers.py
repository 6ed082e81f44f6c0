"""Tools of MCP servers, which are reached by a URL or started by a command."""

import asyncio
import os
import re
import shlex
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.types import CONNECTION_CLOSED, CallToolResult, ImageContent, TextContent

from trueline.data.messages import Tool
from trueline.environments.tools.contents import Part
from trueline.environments.tools.interpreter import EPISODE
from trueline.environments.tools.schemas import UnfitTool
from trueline.usercode.failures import PolicyError

START_SECONDS, STOP_SECONDS = 60.0, 10.0
ATTEMPTS, PAUSE_SECONDS = 3, 0.5  # to reach a server again; the pause doubles
TRIES = 2  # of one call, where the server ends meanwhile
EVERYBODY = ""  # the connection of all episodes
VARIABLE = re.compile(r"\$\{(\w+)\}")
SESSION_OVER = "Session terminated"  # the client's error for a session that the server has dropped
Result = TypeVar("Result")


class ServerGone(RuntimeError):
    """A server cannot be reached."""


class Broken(Exception):
    """A connection ended before the result of a call arrived."""


class Address:
    """Address of a server, with environment variables filled in; messages never show their values."""

    def __init__(self, text: str, headers: Mapping[str, str]) -> None:
        self.text = text  # as it is configured
        self.secrets: set[str] = set()
        self.is_url = text.startswith(("http://", "https://"))
        self.words = [self._fill(word) for word in ([text] if self.is_url else shlex.split(text))]
        self.headers = {name: self._fill(value) for name, value in headers.items()} if self.is_url else {}

    def _fill(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            if not (found := os.environ.get(match[1], "")):
                raise UnfitTool(f"{match[0]}: the environment has no {match[1]}: export it before the start")
            self.secrets.add(found)
            return found

        return VARIABLE.sub(value, text)

    def redact(self, text: str) -> str:
        """Return a text without secrets, which a server or a library may repeat."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        first, *others = self.words
        if self.is_url:
            http = create_mcp_http_client(headers=self.headers)
            async with http, Client(streamable_http_client(first, http_client=http)) as client:
                yield client
        else:  # with this process's environment, in which keys for services are given
            async with Client(StdioServerParameters(command=first, args=others, env=dict(os.environ))) as client:
                yield client


class Connection:
    """One connection, in a task of its own, because one task must open, hold and close it."""

    def __init__(self, connected: AbstractAsyncContextManager[Client]) -> None:
        self.client: Client
        self.there, self.leave = asyncio.Event(), asyncio.Event()
        self.held = asyncio.create_task(self._hold(connected))

    async def _hold(self, connected: AbstractAsyncContextManager[Client]) -> None:
        async with connected as self.client:
            self.there.set()
            await self.leave.wait()

    async def wait_open(self) -> str:
        """Wait until it can be used, and return nothing, or why it cannot."""
        there = asyncio.create_task(self.there.wait())
        await asyncio.wait({there, self.held}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        there.cancel()
        if self.there.is_set():
            return ""
        problem = self.problem() if self.held.done() else f"nothing in {START_SECONDS:g} seconds"
        await self.close()
        return problem

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Return the result of a call, or raise Broken where the connection ends before it comes."""
        work = asyncio.create_task(self.client.call_tool(name, arguments))
        try:
            await asyncio.wait({work, self.held}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or work.cancelled():
                raise Broken(self.problem())
            error = work.exception()
            if error is not None and self.held.done():
                raise Broken(self.problem())
            if isinstance(error, MCPError) and (error.error.code == CONNECTION_CLOSED or SESSION_OVER in str(error)):
                raise Broken(str(error))
            return work.result()
        finally:
            work.cancel()

    def problem(self) -> str:
        """Return why the connection has ended: the innermost error."""
        error = self.held.exception() if self.held.done() and not self.held.cancelled() else None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return f"{type(error).__name__}: {error}" if error else "the connection was closed"

    async def close(self) -> None:
        self.leave.set()
        await asyncio.wait({self.held}, timeout=STOP_SECONDS)
        self.held.cancel()
        await asyncio.wait({self.held}, timeout=STOP_SECONDS)


class McpServer:
    """A server's tools, over one connection of all episodes or one of each, in a loop and a thread of their own."""

    def __init__(self, address: str, headers: Mapping[str, str], connection: str = "auto") -> None:
        self.address = Address(address, headers)
        self.by_episode = connection == "episode" or (connection == "auto" and self.address.is_url)
        self.connections: dict[str, asyncio.Task[Connection]] = {}
        self.loop = asyncio.new_event_loop()

        def spin() -> None:
            self.loop.run_forever()
            self.loop.close()

        threading.Thread(target=spin, daemon=True).start()
        listed = self._run(self._list_tools())
        if listed.exception() is not None:
            self.stop()
        self.schemas = listed.result()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _list_tools(self) -> list[Tool]:
        client = (await self._connection(EVERYBODY, attempts=1)).client
        async with asyncio.timeout(START_SECONDS):
            page = await client.list_tools()
            tools = page.tools
            while page.next_cursor is not None:
                page = await client.list_tools(cursor=page.next_cursor)
                tools = [*tools, *page.tools]
        if self.by_episode:
            await self._close(EVERYBODY)
        functions = [
            {"name": one.name, "description": one.description or "", "parameters": one.input_schema} for one in tools
        ]
        return [{"type": "function", "function": function} for function in functions]

    async def call(self, name: str, arguments: dict[str, Any]) -> str | list[str | Part]:
        """Return a tool's texts and images; an error that the server reports goes to the policy, as MCP defines."""
        key = EPISODE.get() if self.by_episode else EVERYBODY
        result = await asyncio.wrap_future(self._run(self._call(key, name, arguments)))
        blocks = [self._read(block) for block in result.content]
        texts = [block for block in blocks if isinstance(block, str)]
        if result.is_error:
            raise PolicyError("\n".join(texts))
        return "\n".join(texts) if len(texts) == len(blocks) else blocks

    def _read(self, block: Any) -> str | Part:
        if isinstance(block, ImageContent):
            return {"type": "image", "image": f"data:{block.mime_type};base64,{block.data}"}
        return self.address.redact(block.text) if isinstance(block, TextContent) else f"[{block.type}]"

    async def _call(self, key: str, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Make a call, once more over a new connection where the server ends meanwhile."""
        problem = ""
        for _ in range(TRIES):
            connection = await self._connection(key, ATTEMPTS)
            try:
                return await connection.call(name, arguments)
            except Broken as broken:
                problem = str(broken)
                await connection.close()
            except MCPError as error:
                raise RuntimeError(self._says(f"refuses the call of {name!r}: {error}")) from None
        raise ServerGone(self._says(f"ended {TRIES} times while it worked on a call of {name!r}: {problem}"))

    async def _connection(self, key: str, attempts: int) -> Connection:
        """Return the connection of an episode, or of all, that is open, or open one."""
        opening = self.connections.get(key)
        if opening is None or (opening.done() and (opening.exception() or opening.result().leave.is_set())):
            opening = self.connections[key] = asyncio.create_task(self._connect(attempts))
        return await asyncio.shield(opening)  # others may wait for it

    async def _connect(self, attempts: int) -> Connection:
        problem = ""
        for attempt in range(attempts):
            await asyncio.sleep(PAUSE_SECONDS * 2 ** (attempt - 1) if attempt else 0)
            connection = Connection(self.address.connect())
            problem = await connection.wait_open()
            if not problem:
                return connection
        raise ServerGone(self._says(f"does not answer: check its URL or command ({attempts} attempts; {problem})"))

    def _says(self, what: str) -> str:
        return self.address.redact(f"the MCP server {self.address.text!r} {what}")

    async def close(self, episode: str) -> None:
        if self.by_episode:
            await asyncio.wrap_future(self._run(self._close(episode)))

    async def _close(self, key: str) -> None:
        if (opening := self.connections.pop(key, None)) is not None:
            await asyncio.wait({opening})
            if opening.exception() is None:
                await opening.result().close()

    def stop(self) -> None:
        """Close all connections, and end servers that were started for them."""
        self._run(self._close_all()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def _close_all(self) -> None:
        await asyncio.gather(*(self._close(key) for key in list(self.connections)))
