"""What environments, tools and MCP servers return as content: pictures cross the line as data URLs."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.pictures import make_picture, png
from trueline.data.pictures import Setting, read_data_url
from trueline.environments.hosted import as_messages, as_step
from trueline.environments.tools.contents import write_parts
from trueline.environments.tools.toolbox import Toolbox
from trueline.usercode.failures import WrongResult

CODE = """
from PIL import Image

def look() -> list:
    "Look."
    return ["here", Image.new("RGB", (8, 8))]

def spoil():
    "Show what is none."
    return {"type": "image", "image": "nowhere.png"}

def search() -> list:
    "Find pictures elsewhere."
    return [{"type": "image", "url": "https://example.org/a.png"}]
"""


def pixels(part: dict[str, Any]) -> bytes:
    return read_data_url(part["image"], Setting("a test", Path(), 10**6)).decode().tobytes()


def image(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


def test_every_form_of_a_picture_becomes_a_data_url(tmp_path: Path) -> None:
    shown = make_picture(1)
    shown.save(tmp_path / "one.png")
    url = f"data:image/png;base64,{base64.b64encode(png(shown)).decode()}"
    for form in (shown, image(shown), image(png(shown)), image(str(tmp_path / "one.png")), image(url)):
        text, part, open_part = write_parts(("now", form, {"type": "image"}), "a test")
        assert text == {"type": "text", "text": "now"} and open_part == {"type": "image"}
        assert part["image"].startswith("data:image/png;base64,") and pixels(part) == shown.tobytes()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([image(b"none")], r"^here: part 1: its content of 4 bytes is no image that Pillow knows: replace"),
        (["a", image("nowhere.png")], r"^here: part 2: nowhere.png cannot be read .*: relative paths begin in /"),
        ([image("http://example.org/x.png")], r"^here: part 1: 'http.*' is not on this machine.*: download it"),
        ([image(3)], r"^here: part 1 is of type int \(3\): give a path, bytes, a PIL image"),
        ([Image.new("RGB", (2, 2)), 3.5], r"^here: part 2 is 3.5: return texts and images"),
    ],
)
def test_a_bad_part_is_named_with_its_remedy(content: list[Any], said: str) -> None:
    with pytest.raises(WrongResult, match=said):
        write_parts(content, "here")


def test_environments_return_images_alone_and_in_messages() -> None:
    shown = make_picture(2)
    for returned in (shown, [shown], {"messages": shown}, {"messages": [{"role": "user", "content": [shown]}]}):
        (message,) = as_step(returned)["messages"]
        assert message["role"] == "user" and pixels(message["content"][0]) == shown.tobytes()
    assert pixels(as_messages(["look", shown], [], "reset")[0]["content"][1]) == shown.tobytes()
    asked = [{"role": "user", "content": [{"type": "image"}]}]
    assert as_messages(None, asked, "reset") == as_messages(asked, [], "reset") == asked


def test_tools_return_images_and_other_results_stay_text(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    box = Toolbox([f"{tmp_path}/code.py:{name}" for name in ("look", "spoil", "search")], {})
    text, part = asyncio.run(box.call("one", "look", {}))
    assert text == {"type": "text", "text": "here"} and pixels(part) == bytes(8 * 8 * 3)  # type: ignore[arg-type]
    assert asyncio.run(box.call("one", "look", {}, sees=False)) == [text, part], "the run refuses it, with its remedy"
    with pytest.raises(WrongResult, match=r"^what the tool 'spoil' returned: part 1: nowhere.png cannot be read"):
        asyncio.run(box.call("one", "spoil", {}))
    assert asyncio.run(box.call("one", "search", {})) == '[{"type": "image", "url": "https://example.org/a.png"}]'


def test_an_mcp_server_returns_images_and_only_names_them_to_who_reads_text(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "one.png").write_bytes(png(make_picture(3)))
    (tmp_path / "server.py").write_text(
        f"""
from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("screen", log_level="CRITICAL")

@server.tool()
def shoot() -> list:
    "Take a picture."
    return ["here", Image(path={str(tmp_path / "one.png")!r})]

server.run("stdio")
"""
    )
    import sys

    box = Toolbox([f"mcp:{sys.executable} {tmp_path}/server.py"], {})
    try:
        text, part = asyncio.run(box.call("one", "shoot", {}))
        assert text == {"type": "text", "text": "here"}
        assert pixels(part) == make_picture(3).tobytes()  # type: ignore[arg-type]
        assert asyncio.run(box.call("one", "shoot", {}, sees=False)) == "here\n[image]"
    finally:
        box.holders[0].stop()  # type: ignore[union-attr]
