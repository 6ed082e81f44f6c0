"""Ray nodes with addresses of their own on one machine: network namespaces, each with a line to a bridge."""

import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

PORT = 6379
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Nodes:
    """A cluster whose node N has the address 10.77.0.(N+1); none of them sees another's loopback."""

    folder: Path
    slots: Sequence[int]
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    raylets: list[subprocess.Popen[bytes]] = field(default_factory=list)
    sockets: str = ""
    number: int = field(default_factory=partial(next, itertools.count()))

    def name(self, node: int) -> str:
        return f"{self.hub()}n{node}"

    def hub(self) -> str:
        return f"tl{os.getpid()}x{self.number}"

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def environment(self) -> dict[str, str]:
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_USAGE_STATS_ENABLED": "0"}
        left = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
        left.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)
        return left | own | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": f"{self.address(0)}:{PORT}"}

    def inside(self, node: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name(node), *words]

    def start(self) -> None:
        self.sockets = tempfile.mkdtemp(prefix="tl")  # with a short path, for their names have little room
        hub, bridge = self.hub(), "tlbridge"
        run("ip", "netns", "add", hub)
        run("ip", "-n", hub, "link", "add", bridge, "type", "bridge")
        run("ip", "-n", hub, "link", "set", bridge, "up")
        for node, _ in enumerate(self.slots):
            name, line = self.name(node), f"tl{os.getpid() % 10000}{self.number}l{node}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", line, "type", "veth", "peer", "name", f"{line}p")
            run("ip", "link", "set", f"{line}p", "netns", hub)
            run("ip", "-n", hub, "link", "set", f"{line}p", "master", bridge, "up")
            run("ip", "link", "set", line, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{self.address(node)}/24", "dev", line)
            run("ip", "-n", name, "link", "set", line, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            self.raylets.append(self.raylet(node))

    def raylet(self, node: int) -> subprocess.Popen[bytes]:
        """Start Ray on a node; the first is the head. The call returns before it is up."""
        ray = str(Path(sys.executable).with_name("ray"))
        where = ["--head", f"--port={PORT}", f"--temp-dir={self.sockets}", "--include-dashboard=false"]
        words = where if node == 0 else [f"--address={self.address(0)}:{PORT}"]
        words += [f"--node-ip-address={self.address(node)}", f"--num-cpus={self.slots[node]}", "--block"]
        environment = self.environment()
        del environment["RAY_ADDRESS"]
        with (self.folder / f"node-{node}.log").open("wb") as log:
            command = self.inside(node, ray, "start", *words, "--object-store-memory=200000000")
            started = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        asked = self.inside(0, ray, "status", f"--address={self.address(0)}:{PORT}")
        while (
            subprocess.run(asked, env=self.environment(), capture_output=True, text=True).stdout.count(" node_") <= node
        ):
            assert started.poll() is None, (self.folder / f"node-{node}.log").read_text()
        return started

    def kill(self, node: int) -> None:
        """End a node with all of its processes, at once."""
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self, node: int) -> list[psutil.Process]:
        done = subprocess.run(["ip", "netns", "pids", self.name(node)], capture_output=True, text=True, check=False)
        return [psutil.Process(int(pid)) for pid in done.stdout.split() if psutil.pid_exists(int(pid))]

    def stop(self) -> None:
        for node, _ in reversed(list(enumerate(self.slots))):
            self.kill(node)
            subprocess.run(["ip", "netns", "del", self.name(node)], check=False)
        for raylet in self.raylets:
            raylet.wait()
        subprocess.run(["ip", "netns", "del", self.hub()], check=False)
        shutil.rmtree(self.sockets, ignore_errors=True)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def forbidden() -> str:
    """Say why there can be no namespaces here, or nothing."""
    if shutil.which("ip") is None:
        return "no `ip` command"
    done = subprocess.run(["ip", "netns", "add", f"tl{os.getpid()}t"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", f"tl{os.getpid()}t"], capture_output=True, check=False)
    return f"no network namespaces: {done.stderr.strip()}" if done.returncode else ""


@contextlib.contextmanager
def nodes(folder: Path, slots: Sequence[int]) -> Iterator[Nodes]:
    cluster = Nodes(folder, slots)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
