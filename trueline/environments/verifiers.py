"""Environments of verifiers: an interpreter of their own plays them, and reaches the policy through its endpoint."""

import asyncio
import json
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

from trueline.data.named.verifiers_rows import program
from trueline.environments.hosted import Values, end_with, number_of
from trueline.usercode.failures import NoSuchFunction

Line = dict[str, Any]


class VerifiersFailure(RuntimeError):
    """An episode that verifiers did not score."""


class VerifiersCode:
    """Sends episodes to one program, as JSON lines, and awaits a line about each."""

    def __init__(self, specification: list[str], options: dict[str, Any]) -> None:
        self.name, self.python = specification[0].removeprefix("verifiers:"), [*specification[1:], ""][0]
        self.options = options
        self.playing: dict[str, asyncio.Future[Line]] = {}
        self.process: subprocess.Popen[str]

    def describe(self) -> dict[str, Any]:
        python = str(Path(self.python).expanduser())
        if not self.python or shutil.which(python) is None:
            problem = f"environment.python={self.python} is no command" if self.python else "its interpreter is unknown"
            raise NoSuchFunction(f"{problem}: set environment.python=/path/to/venv/bin/python, which has verifiers")
        command = program(python, "play", self.name, self.options)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        first = json.loads(self.process.stdout.readline() or '{"error": "the program ended"}')
        if "error" in first:
            raise NoSuchFunction(f"verifiers cannot load it: {first['error']}; install it for {python}")
        threading.Thread(target=self._read, daemon=True).start()
        return {"plays": "itself", "required": []}

    async def play(self, episode: str, values: Values, url: str, key: str) -> Line:
        reply = self.playing[episode] = asyncio.get_running_loop().create_future()
        self._write({"episode": episode, "values": values, "url": url, "key": key})
        line = await reply
        if line.get("error"):
            raise VerifiersFailure(line["error"])
        metrics = {
            name: number_of(value, f"the metric {name!r} of verifiers") for name, value in line["metrics"].items()
        }
        reward = line["reward"]
        return {"reward": None if reward is None else number_of(reward, "the reward of verifiers"), "metrics": metrics}

    async def close(self, episode: str) -> None:
        if (reply := self.playing.pop(episode, None)) and not reply.done():
            reply.cancel()
            self._write({"episode": episode})

    def _write(self, line: Line) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line, default=str) + "\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in map(json.loads, self.process.stdout):
            if reply := self.playing.get(line["episode"]):
                reply.get_loop().call_soon_threadsafe(settle, reply, line)
        end_with(self.process)


def settle(reply: "asyncio.Future[Line]", line: Line) -> None:
    if not reply.done():
        reply.set_result(line)
