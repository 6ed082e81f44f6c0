"""MCP servers that die, are asked by many episodes, and want keys: real ones, by pipes and by HTTP."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from trueline.config.environment import EnvironmentConfig
from trueline.environments.tools.schemas import UnfitTool
from trueline.environments.tools.toolbox import Toolbox

pytest.importorskip("mcp")
SERVER = '''
import asyncio, os, sys

from mcp.server import MCPServer

server = MCPServer("numbers", log_level="CRITICAL")
counted = []

@server.tool()
def count() -> int:
    """Count the calls to this process."""
    counted.append(1)
    return len(counted)

@server.tool()
def leave() -> None:
    """End the server."""
    os._exit(3)

@server.tool()
def tell(text: str) -> str:
    """Return a text and the arguments of the server."""
    return " ".join([text, *sys.argv[2:]])

@server.tool()
async def hold(path: str) -> str:
    """Wait until there is a file."""
    while not os.path.exists(path):
        await asyncio.sleep(0.01)
    return "held"

async def guarded(scope, receive, send):
    headers = dict(scope.get("headers", []))
    if scope["type"] == "http" and headers.get(b"authorization") != b"Bearer " + os.environ["MY_TOKEN"].encode():
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})
    else:
        await app(scope, receive, send)

if sys.argv[1] == "stdio":
    server.run("stdio")
else:
    import uvicorn
    app = server.streamable_http_app()
    uvicorn.run(guarded, port=int(sys.argv[1]), log_level="critical")
'''
TOKEN = "a-secret-token"
HEADERS = {"mcp_headers": {"Authorization": "Bearer ${MY_TOKEN}"}}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    monkeypatch.setattr("trueline.environments.tools.mcp_servers.PAUSE_SECONDS", 0.01)
    (tmp_path / "server.py").write_text(SERVER)
    return str(tmp_path / "server.py")


@contextmanager
def opened(specification: str, options: dict[str, Any]) -> Iterator[tuple[Toolbox, Callable[..., str]]]:
    """A toolbox, and a function that calls a tool for an episode."""
    with ThreadPoolExecutor() as threads:
        loop = asyncio.new_event_loop()
        spinning = threads.submit(loop.run_forever)
        box = Toolbox([specification], options)

        def call(episode: str, name: str, **arguments: Any) -> str:
            return asyncio.run_coroutine_threadsafe(box.call(episode, name, arguments), loop).result()

        try:
            yield box, call
        finally:
            for server in box.holders:
                server.stop()
            loop.call_soon_threadsafe(loop.stop)
            spinning.result()
            loop.close()


def children() -> list[psutil.Process]:
    found = psutil.Process().children()
    return [one for one in found if one.status() != psutil.STATUS_ZOMBIE and "server.py" in " ".join(one.cmdline())]


def close(box: Toolbox, episode: str) -> None:
    asyncio.run(box.close(episode))


def test_a_server_that_is_shared_is_started_again_and_shows_no_secret(script: str, tmp_path: Path) -> None:
    """A comma of the command is its own; a server that repeats the secret tells the policy nothing."""
    (tool,) = EnvironmentConfig(tools=f"mcp:{sys.executable} {script} stdio a,b --token=${{MY_TOKEN}}").tools
    with opened(tool, {}) as (_, call), ThreadPoolExecutor() as threads:
        assert call("one", "tell", text="it is") == "it is a,b --token=***"
        held = threads.submit(call, "one", "hold", path=str(tmp_path / "go"))
        assert call("two", "count") == "1" and not held.done()  # episodes do not wait for each other
        (tmp_path / "go").touch()
        assert held.result() == "held"
        (first,) = children()
        first.kill()
        first.wait()
        assert (call("one", "count"), call("two", "count")) == ("1", "2")
        assert len(children()) == 1 and children() != [first]
    assert children() == []


@pytest.mark.slow
def test_a_server_that_does_not_come_back_is_said_to_be_gone(script: str) -> None:
    with opened(f"mcp:{sys.executable} {script} stdio", {}) as (_, call):
        with pytest.raises(RuntimeError, match=r"server.py stdio' ended 2 times while it worked on a call of 'leave'"):
            call("one", "leave")
        assert call("two", "count") == "1"
        os.remove(script)
        (first,) = children()
        first.kill()
        first.wait()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"the MCP server .* does not answer: .*\(3 attempts; "):
                call("one", "count")


@pytest.mark.slow
def test_each_episode_may_have_a_server_of_its_own(script: str, tmp_path: Path) -> None:
    with (
        opened(f"mcp:{sys.executable} {script} stdio", {"mcp_connection": "episode"}) as (box, call),
        ThreadPoolExecutor() as threads,
    ):
        assert children() == []  # the one that told its tools is not kept
        held = threads.submit(call, "one", "hold", path=str(tmp_path / "go"))
        assert (call("two", "count"), call("two", "count"), held.done()) == ("1", "2", False)
        (tmp_path / "go").touch()
        assert (held.result(), call("one", "count"), len(children())) == ("held", "1", 2)
        close(box, "one")
        close(box, "never began")
        assert len(children()) == 1 and call("two", "count") == "3"
    assert children() == []


def test_a_variable_that_there_is_not_is_told() -> None:
    with pytest.raises(ValueError, match=r"\$\{NO_SUCH\}: the environment has no NO_SUCH: export it"):
        Toolbox(["mcp:server ${NO_SUCH}"], {})


@contextmanager
def serving(script: str, port: int) -> Iterator[None]:
    with subprocess.Popen([sys.executable, script, str(port)]) as process:
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    assert process.poll() is None
                    time.sleep(0.02)
            yield
        finally:
            process.kill()


@pytest.mark.slow
def test_a_server_behind_http_with_a_key(script: str) -> None:
    """Headers bring it; a session of each episode; a server that was started again is reached again, or is gone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"mcp:http://127.0.0.1:{port}/mcp?key=${{MY_TOKEN}}"
    with serving(script, port):
        with pytest.raises(UnfitTool, match="does not answer") as caught:
            Toolbox([address], {})
        assert TOKEN not in str(caught.value) and caught.value.__cause__ is None
    with opened_beside(script, port, address) as (box, call, again):
        assert (call("one", "count"), call("two", "count")) == ("1", "2")
        (server,) = box.holders
        assert set(server.connections) == {"one", "two"}
        close(box, "two")
        assert set(server.connections) == {"one"}
        again()
        assert call("one", "count") == "1"  # of the new process
        again(stay=False)
        with pytest.raises(RuntimeError, match=r"does not answer: .*\(3 attempts; ") as caught:
            call("one", "count")
        assert TOKEN not in "".join(map(str, (caught.value, caught.value.__cause__, caught.value.__context__)))


@contextmanager
def opened_beside(script: str, port: int, address: str) -> Iterator[Any]:
    """A toolbox and its server by HTTP, and a function that starts the server again, or only ends it."""
    running = serving(script, port)
    running.__enter__()

    def again(stay: bool = True) -> None:
        nonlocal running
        running.__exit__(None, None, None)
        if stay:
            running = serving(script, port)
            running.__enter__()

    with opened(address, HEADERS) as (box, call):
        yield box, call, again


# Configuration


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        ("python, file.py:f,python", ["python", "file.py:f", "python"]),
        ("mcp:server a,b", ["mcp:server a,b"]),
        (
            "mcp:server --x=1,2, 3,python,mcp:https://host/mcp,a.b:c",
            ["mcp:server --x=1,2, 3", "python", "mcp:https://host/mcp", "a.b:c"],
        ),
        ("calculatr,python", ["calculatr", "python"]),
    ],
)
def test_commas_of_a_command_do_not_cut_it(text: str, tools: list[str]) -> None:
    assert EnvironmentConfig(tools=text).tools == tools
    assert EnvironmentConfig(tools=tools).tools == tools


@pytest.mark.parametrize(
    "address", ["https://me:word@host/mcp", "https://me@host/", "http://h/?key=abcdef", "http://h/?abc", "http://h/#x"]
)
def test_secrets_in_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValidationError, match=r"write \$\{NAME\}"):
        EnvironmentConfig(tools=[f"mcp:{address}"])


def test_variables_in_addresses_and_headers_are_taken_and_written_as_they_are() -> None:
    tools = [
        "mcp:https://${USER}:${WORD}@host:80/mcp?key=${KEY}&other=${KEY}",
        "mcp:server --key ${KEY}",
        "mcp:https://host:80/b",
    ]
    assert EnvironmentConfig(tools=tools).model_dump()["tools"] == tools
    config = EnvironmentConfig(tools=tools[2:], options=HEADERS)
    assert config.model_dump()["options"] == HEADERS and TOKEN not in config.model_dump_json()


def test_headers_are_checked_before_the_start() -> None:
    for headers in ({"Authorization": "Bearer abc"}, "Bearer ${MY_TOKEN}"):
        with pytest.raises(ValidationError, match=r"each value with an environment variable"):
            EnvironmentConfig(tools=["mcp:https://host/mcp"], options={"mcp_headers": headers})
    with pytest.raises(ValidationError, match="would be sent to a, b"):
        EnvironmentConfig(tools=["mcp:https://a/mcp", "mcp:https://b/mcp"], options=HEADERS)
    with pytest.raises(ValueError, match="take one of auto, episode, shared"):
        Toolbox(["mcp:server"], {"mcp_connection": "always"})
    with pytest.raises(ValueError, match=r"options\.mcp_headers: none of the tools has such an option"):
        Toolbox(["python"], HEADERS)
