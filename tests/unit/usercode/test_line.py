"""The connection to a process of user code: whole objects, however their bytes are divided."""

import asyncio
import json
import socket
from typing import Any

import pytest

from trueline.usercode import line as line_module
from trueline.usercode.line import Line


def test_what_is_sent_in_one_round_goes_together_and_parts_of_lines_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk() -> list[dict[str, Any]]:
        ours, theirs = socket.socketpair()
        received: list[dict[str, Any]] = []
        line = await Line.connect(ours, received.append)
        sent: list[bytes] = []
        monkeypatch.setattr(line.transport, "write", sent.append)
        line.send('{"id": 1}')
        line.send('{"id": 2}')
        await asyncio.sleep(0)
        assert sent == [b'{"id": 1}\n{"id": 2}\n']
        for part in (b'{"id"', b': 3}\n{"id": 4}\n{"te', b'xt": "\xc3', b'\xb6"}\n'):
            line.data_received(part)
        theirs.close()
        assert await line.ended == ""
        line.send("{}")  # to nobody
        await asyncio.sleep(0)
        return received

    assert asyncio.run(talk()) == [{"id": 3}, {"id": 4}, {"text": "ö"}]


@pytest.mark.parametrize("data", [b"no JSON\n", b'"' + b"x" * 100 + b'"\n', b"x" * 101])
def test_what_cannot_be_read_ends_it(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "LONGEST_LINE", 100)

    async def listen() -> str:
        ours, theirs = socket.socketpair()
        line = await Line.connect(ours, lambda received: None)
        theirs.sendall(json.dumps({"id": 1}).encode() + b"\n" + data)
        return await line.ended

    assert asyncio.run(listen())
