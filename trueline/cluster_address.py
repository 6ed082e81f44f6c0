"""Whether a Ray head can be at an address: tried before Ray is, which would wait for minutes."""

import os
import socket

from trueline.config.base import ConfigError

SECONDS = 12  # for each of connecting and answering
# How a client of HTTP/2 begins, and an empty frame of settings; gRPC, which Ray speaks, answers with its own settings.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
FRAME_BYTES, KIND, SETTINGS = 9, 3, 4
HEAD = "RAY_AUTH_MODE=token ray start --head --port="


def check_address(address: str, key: str) -> None:
    """Refuse an address at which no Ray head can be; `key` is what holds it."""
    if address != "auto" and not address.startswith("ray://") and (said := complaint(address)):
        raise ConfigError(f"{key}={address}: {said}")


def complaint(address: str) -> str:
    """Return why no Ray head can be had at HOST:PORT, with the remedy, or nothing."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        return "name HOST:PORT, where Ray's usual port is 6379, or auto on a node of the cluster"
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), SECONDS) as connection:
            return "" if "RAY_USE_TLS" in os.environ or greeted(connection) else not_ray(port)
    except (socket.gaierror, UnicodeError) as error:
        return f"the host {host} is not known here ({error}): correct its name, or give its IP address"
    except OSError as error:
        return (
            f"nothing answers there ({error.strerror or error}): start a head on {host} with `{HEAD}{port}`, or mend "
            "the address"
        )


def greeted(connection: socket.socket) -> bool:
    try:
        connection.sendall(GREETING)
        answer = connection.recv(FRAME_BYTES, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(answer) == FRAME_BYTES and answer[KIND] == SETTINGS


def not_ray(port: str) -> str:
    return f"what answers there is no Ray head: name the port that `ray start --head` was given (got {port})"
