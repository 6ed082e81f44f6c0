"""A small Hugging Face Hub on this machine: it makes repositories and takes commits, whose files it keeps."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_secret"
SHA = "a" * 40


@dataclass
class SmallHub:
    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)  # by repository
    objects: dict[str, bytes] = field(default_factory=dict)  # large files, by their SHA-256
    files: dict[str, bytes] = field(default_factory=dict)  # of commits, by path
    refused: int = 0  # requests without the token

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        name = f"{body.get('organization') or 'me'}/{body['name']}"
        self.private[name] = body.get("visibility", "private" if body.get("private") else "public") == "private"
        return {"url": f"{self.address}/{name}", "name": name, "id": name}

    def preupload(self, body: dict[str, Any]) -> dict[str, Any]:
        large = {one["path"]: one["path"].endswith(".safetensors") for one in body["files"]}
        modes = {path: "lfs" if is_large else "regular" for path, is_large in large.items()}
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}

    def batch(self, body: dict[str, Any]) -> dict[str, Any]:
        """Say where large files are to be put."""
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.address}/objects/{one['oid']}"}}} for one in body["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def commit(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.objects[value["oid"]]
        return {"commitUrl": f"{self.address}/me/tiny/commit/{SHA}", "commitOid": SHA, "success": True}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: SmallHub

    def answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def do_PUT(self) -> None:
        self.hub.objects[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_GET(self) -> None:
        self.answer({"id": "me/tiny", "sha": SHA, "siblings": [], "name": "me", "type": "user"})

    def do_POST(self) -> None:
        data = self.body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.hub.refused += 1
            self.answer({"error": "Invalid token"}, 401)
        elif "/commit/" in self.path:
            self.answer(self.hub.commit([json.loads(line) for line in data.splitlines() if line]))
        else:
            calls = {"/repos/create": self.hub.create, "/preupload/": self.hub.preupload, "/info/lfs/": self.hub.batch}
            calls["/validate-yaml"] = lambda body: {"errors": [], "warnings": []}
            self.answer(next(call for part, call in calls.items() if part in self.path)(json.loads(data)))

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def small_hub() -> Iterator[SmallHub]:
    hub = SmallHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
