"""The live page of runs, served to this machine alone, and updated as they progress."""

import asyncio
import hmac
import secrets
import signal
import socket
import sys
import threading

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trueline.monitoring.run_folder import RunFolder
from trueline.report.digest import as_json, describe
from trueline.report.page import page
from trueline.report.runs import ReportedRun
from trueline.usercode.http_server import QuietServer, open_port

HOST = "127.0.0.1"
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class LiveServer(QuietServer):
    """Serves the page, and its content once that has changed, to clients that know the token."""

    def __init__(self, runs: dict[str, RunFolder], token: str) -> None:
        self.runs, self.lock = [ReportedRun(name, folder) for name, folder in runs.items()], threading.Lock()
        self.stamp, self.content, self.token, self.title = "", b"", token, ", ".join(runs)
        routes = [Route("/{token}/", self._page), Route("/{token}/data", self._data)]
        super().__init__(routes, unknown=nothing_here, refused=nothing_here)

    def end(self) -> None:
        self.should_exit = True

    def latest(self) -> tuple[str, bytes]:
        """Return the content of the page as JSON, which is made again if a file has changed, and its stamp."""
        with self.lock:
            stamp = "-".join(run.stamp() for run in self.runs) or "nothing"
            if stamp != self.stamp:
                shown = describe([run.read() for run in self.runs])
                self.stamp, self.content = stamp, as_json(shown | {"stamp": stamp})
            return self.stamp, self.content

    async def _page(self, request: Request) -> Response:
        _, content = await self._content_for(request)
        return Response(page(content, title=self.title, connects="'self'"), headers=HEADERS, media_type="text/html")

    async def _data(self, request: Request) -> Response:
        stamp, content = await self._content_for(request)
        if request.query_params.get("known") == stamp:
            return Response(status_code=204, headers=HEADERS)
        return Response(content, headers=HEADERS, media_type="application/json")

    async def _content_for(self, request: Request) -> tuple[str, bytes]:
        if not hmac.compare_digest(request.path_params["token"].encode(), self.token.encode()):
            raise HTTPException(404)
        return await asyncio.to_thread(self.latest)


async def nothing_here(request: Request, error: Exception) -> Response:
    return Response("nothing here: open the address that `trueline watch` has printed\n", 404, headers=HEADERS)


def watch(runs: dict[str, RunFolder], port: int) -> int:
    """Serve the page of these runs until Ctrl-C or SIGTERM."""
    with open_port(HOST, port) as listener:
        asyncio.run(serve(LiveServer(runs, secrets.token_urlsafe(32)), listener))
    return 0


async def serve(server: LiveServer, listener: socket.socket) -> None:
    for signalled in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signalled, server.end)
    port = listener.getsockname()[1]
    sys.stdout.write(f"watching {server.title}; Ctrl-C ends it\nhttp://{HOST}:{port}/{server.token}/\n")
    sys.stdout.flush()
    await server.serve([listener])
