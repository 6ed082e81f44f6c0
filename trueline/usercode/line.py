"""The connection to a process of user code: one JSON object a line, in both directions."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

LONGEST_LINE = 64 * 2**20


class Line(asyncio.Protocol):
    """Sends all objects of one round of the event loop together, and hands over each object as it comes."""

    def __init__(self, receive: Callable[[dict[str, Any]], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.receive = receive
        self.waiting: list[bytes] = []  # to be sent
        self.begun: list[bytes] = []  # parts of a line that has not ended
        self.ended: asyncio.Future[str] = self.loop.create_future()  # with what could not be read, if that is why
        self.transport: asyncio.Transport

    @classmethod
    async def connect(cls, end: socket.socket, receive: Callable[[dict[str, Any]], None]) -> "Line":
        line = cls(receive)
        await line.loop.create_connection(lambda: line, sock=end)
        return line

    def send(self, text: str) -> None:
        if not self.waiting:
            self.loop.call_soon(self._send_waiting)
        self.waiting.append(text.encode() + b"\n")

    def _send_waiting(self) -> None:
        lines, self.waiting = self.waiting, []
        if not self.transport.is_closing():  # else the reader has seen the end
            self.transport.write(b"".join(lines))

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.begun.append(data)
        lines = []
        if b"\n" in data:
            *lines, rest = b"".join(self.begun).split(b"\n")
            self.begun = [rest]
        try:
            if max([sum(map(len, self.begun)), *map(len, lines)]) > LONGEST_LINE:
                raise ValueError(f"a line has more than {LONGEST_LINE} bytes")
            for line in lines:
                self.receive(json.loads(line))
        except ValueError as error:
            self.end(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self.end()

    def end(self, why: str = "") -> None:
        self.transport.close()
        if not self.ended.done():
            self.ended.set_result(why)
