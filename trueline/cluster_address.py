"""Whether a Ray head is at an address and lets this machine in: tried before Ray is, which would wait for minutes."""

import os
import socket
from importlib.util import find_spec
from pathlib import Path

from trueline.config.base import ConfigError

SECONDS = 8  # for each of connecting and answering
# How a client of HTTP/2 begins, and an empty frame of settings; gRPC, which Ray speaks, answers with its own settings.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
FRAME_BYTES, KIND, SETTINGS = 9, 3, 4
CHECK = "/ray.rpc.NodeInfoGcsService/CheckAlive"
START = "RAY_AUTH_MODE=token ray start --head --port="
NO_RAY = "what answers there is no Ray head: name the port that `ray start --head` was given"
OPEN = "asks for no token, so whoever reaches it can run programs there: start it with"


def check_address(address: str, key: str) -> str:
    """Refuse an address at which no Ray head can be joined; return a warning of one that anybody can join.

    `key` is what holds the address.
    """
    if address == "auto" or address.startswith("ray://"):
        return ""
    said = complaint(address) or complaint_of_token(address)
    if said.startswith(OPEN):
        return f"warning: the Ray head at {address} {said}"
    if said:
        raise ConfigError(f"{key}={address}: {said}")
    return ""


def complaint(address: str) -> str:
    """Return why no Ray head can be at HOST:PORT, with the remedy, or nothing."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        return "name HOST:PORT, where Ray's usual port is 6379, or auto on a node of the cluster"
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), SECONDS) as connection:
            return "" if encrypted() or greeted(connection) else NO_RAY
    except (socket.gaierror, UnicodeError) as error:
        return f"the host {host} is not known here ({error}): correct its name, or give its IP address"
    except OSError as error:
        why = error.strerror or error
        return f"nothing answers there ({why}): start a head on {host} with `{START}{port}`, or correct the address"


def encrypted() -> bool:
    return os.environ.get("RAY_USE_TLS", "0") not in ("", "0")


def greeted(connection: socket.socket) -> bool:
    try:
        connection.sendall(GREETING)
        answer = connection.recv(FRAME_BYTES, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(answer) == FRAME_BYTES and answer[KIND] == SETTINGS


def complaint_of_token(address: str) -> str:
    """Return what is wrong with the tokens of the head and of this machine, where gRPC is there to ask by."""
    if encrypted() or find_spec("grpc") is None:
        return ""
    without = answer_of(address, "")
    if without == "OK":
        return f"{OPEN} `{START}{address.rpartition(':')[2]}` (docs/cluster.md)"
    if without != "UNAUTHENTICATED":
        return NO_RAY if without == "UNIMPLEMENTED" else ""
    token = own_token()
    if not token:
        return (
            "the head wants a token: set RAY_AUTH_MODE=token here, and put the head's token into ~/.ray/auth_token or "
            "RAY_AUTH_TOKEN (docs/cluster.md)"
        )
    refused = answer_of(address, token) == "UNAUTHENTICATED"
    return "the head has another token than this machine: copy its ~/.ray/auth_token here" if refused else ""


def answer_of(address: str, token: str) -> str:
    """Ask a head whether it is alive, and return the name of gRPC's status."""
    import grpc  # noqa: PLC0415  (of no use to who has no cluster)

    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary(CHECK, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(b"", timeout=SECONDS, metadata=[("authorization", f"Bearer {token}")] if token else [])
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def own_token() -> str:
    """Return the token that Ray would send, or nothing."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return ""
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    return os.environ.get("RAY_AUTH_TOKEN") or (file.read_text().strip() if file.is_file() else "")
