"""An address of a cluster is tried before Ray is: against servers that are and are not what Ray's head is."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest

from trueline import cluster_address
from trueline.cluster_address import CHECK, check_address
from trueline.config.base import ConfigError


class Head(grpc.GenericRpcHandler):
    """Answers the one call, to whoever has the token, as a head does."""

    def __init__(self, token: str, method: str = CHECK) -> None:
        self.token, self.method = token, method

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method != self.method:
            return None
        given = dict(details.invocation_metadata).get("authorization", "Bearer ")

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if given != f"Bearer {self.token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def serving(head: Head) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[head])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def refused(address: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_address(address, "cluster.address")
    assert str(caught.value).startswith(f"cluster.address={address}: ")
    return str(caught.value)


def test_a_head_without_a_token_gives_a_warning_and_one_with_it_requires_it(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Head("")) as address:
        port = address.rpartition(":")[2]
        said = check_address(address, "cluster.address")
        assert said.startswith(f"warning: the Ray head at {address} requires no token")
        assert f"start it with `RAY_AUTH_MODE=token ray start --head --port={port}`" in said
    with serving(Head("secret")) as address:
        assert "the head requires a token: set RAY_AUTH_MODE=token here" in refused(address)
        (own_home / ".ray").mkdir()
        (own_home / ".ray" / "auth_token").write_text("other\n")
        assert "the head has a different token than this machine" in refused(address)
        (own_home / ".ray" / "auth_token").write_text("secret\n")
        assert check_address(address, "cluster.address") == ""
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        assert "the head requires a token" in refused(address)
    with serving(Head("", "/another.Service/Call")) as address:
        assert "the server there is not a Ray head" in refused(address)


def test_what_is_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        monkeypatch.setattr(BaseHTTPRequestHandler, "log_message", lambda *_: None)
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert "the server there is not a Ray head" in refused(f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(cluster_address, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "the server there is not a Ray head" in refused(f"127.0.0.1:{silent.getsockname()[1]}")
    assert "nothing answers there" in refused("127.0.0.1:1")
    for address in ("127.0.0.1", "127.0.0.1:", ":6379", "127.0.0.1:99999"):
        assert "give HOST:PORT" in refused(address)
    assert check_address("auto", "cluster.address") == ""
