"""Tests whether a Ray head answers at an address and admits this machine; Ray itself would wait for minutes."""

import os
import socket
from importlib.util import find_spec
from pathlib import Path

from trueline.config.base import ConfigError

SECONDS = 8  # for connecting, and for the reply
# How an HTTP/2 client begins, and an empty settings frame; gRPC, which Ray uses, replies with its own settings.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
FRAME_BYTES, KIND, SETTINGS = 9, 3, 4
CHECK = "/ray.rpc.NodeInfoGcsService/CheckAlive"
START = "RAY_AUTH_MODE=token ray start --head --port="
NO_RAY = "the server there is not a Ray head: use the port given to `ray start --head`"


def check_address(address: str, key: str) -> str:
    """Refuse an address, given by `key`, where no Ray head can be joined; return a warning if anyone can join it."""
    if address == "auto" or address.startswith("ray://"):
        return ""
    problem, status = connection_problem(address), ""
    if not problem and not uses_tls() and find_spec("grpc") is not None:
        status = grpc_status(address)
        problem = token_problem(address, status)
    if problem:
        raise ConfigError(f"{key}={address}: {problem}")
    danger = f"the Ray head at {address} requires no token, so anyone who reaches it can run code there"
    remedy = f"start it with `{START}{address.rpartition(':')[2]}` (docs/cluster.md)"
    return f"warning: {danger}: {remedy}" if status == "OK" else ""


def connection_problem(address: str) -> str:
    """Return why no Ray head can be at HOST:PORT, with the remedy, or nothing."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        return "give HOST:PORT (Ray's usual port is 6379), or auto on a node of the cluster"
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), SECONDS) as connection:
            return "" if uses_tls() or speaks_http2(connection) else NO_RAY
    except (socket.gaierror, UnicodeError) as error:
        return f"the host {host} cannot be resolved ({error}): correct its name, or give its IP address"
    except OSError as error:
        why = error.strerror or error
        return f"nothing answers there ({why}): start a head on {host} with `{START}{port}`, or correct the address"


def uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0") not in ("", "0")


def speaks_http2(connection: socket.socket) -> bool:
    try:
        connection.sendall(GREETING)
        reply = connection.recv(FRAME_BYTES, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(reply) == FRAME_BYTES and reply[KIND] == SETTINGS


def token_problem(address: str, status: str) -> str:
    """Return what is wrong with this machine's token at a head that replied so without one, or nothing."""
    if status != "UNAUTHENTICATED":
        return NO_RAY if status == "UNIMPLEMENTED" else ""
    token = ""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() == "token":  # as Ray would send it
        file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
        token = os.environ.get("RAY_AUTH_TOKEN") or (file.read_text().strip() if file.is_file() else "")
    if not token:
        place = "put the head's token into ~/.ray/auth_token or RAY_AUTH_TOKEN (docs/cluster.md)"
        return f"the head requires a token: set RAY_AUTH_MODE=token here, and {place}"
    if grpc_status(address, token) == "UNAUTHENTICATED":
        return "the head has a different token than this machine: copy its ~/.ray/auth_token here"
    return ""


def grpc_status(address: str, token: str = "") -> str:
    """Call a head's liveness check, and return the name of gRPC's status."""
    import grpc  # noqa: PLC0415  (only needed with a cluster)

    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(CHECK, request_serializer=bytes, response_deserializer=bytes)
        try:
            call(b"", timeout=SECONDS, metadata=[("authorization", f"Bearer {token}")] if token else [])
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"
