"""A real HTTP server in a thread, which answers as a test says: a scorer, a judge, or a broken one."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Reply = tuple[int, dict[str, str], Any]  # status, headers, and JSON or text
Answer = Callable[[dict[str, Any], int], Reply]  # of a request's body and its number, from 0


class Scripted(ThreadingHTTPServer):
    """Answers as a test says, and remembers what it was asked."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.lock, self.busy, self.busiest = threading.Lock(), 0, 0
        self.released = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_GET(self) -> None:
        self.respond({})

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def respond(self, body: dict[str, Any]) -> None:
        with self.server.lock:
            number = len(self.server.asked)
            self.server.asked.append({"path": self.path, **body})
            self.server.tokens.append(self.headers.get("Authorization"))
            self.server.busy += 1
            self.server.busiest = max(self.server.busiest, self.server.busy)
        status, headers, content = self.server.answer(body, number)
        with self.server.lock:
            self.server.busy -= 1
        text = content if isinstance(content, str) else json.dumps(content)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(text.encode())), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


Serve = Callable[[Answer], Scripted]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Scripted] = []

    def start(answer: Answer) -> Scripted:
        servers.append(Scripted(answer))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()


def said(text: Any) -> Answer:
    return lambda body, number: (200, {}, {"choices": [{"message": {"role": "assistant", "content": text}}]})


def grader(is_met: Callable[[str, int, str], bool]) -> Answer:
    """Answer as a judge of rubrics, which is asked about each criterion, its number and the whole prompt."""

    def answer(body: dict[str, Any], number: int) -> Reply:
        if "messages" not in body:
            return 200, {}, {"data": [{"id": "wise"}]}
        prompt = body["messages"][0]["content"]
        listed = re.findall(r"^(\d+)\. (.*)$", prompt.partition("[Criteria]")[2], flags=re.MULTILINE)
        verdicts = {place: is_met(criterion, int(place), prompt) for place, criterion in listed}
        return said(f"Let me see {{...}}.\n```json\n{json.dumps(verdicts)}\n```")(body, number)

    return answer
