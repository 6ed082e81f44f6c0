"""Reward functions in processes of their own, with a deadline that kills."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.data import RewardConfig
from trueline.rewards.base import RewardFailure, RewardTimeout

ALWAYS_GIVEN = ("reply", "prompt", "messages")
START_SECONDS = 60
LONGEST_LINE = 64 * 2**20


def command(config: RewardConfig) -> list[str]:
    return [sys.executable, "-m", "trueline.rewards.process", config.function, str(config.memory_gib)]


def check_reward(config: RewardConfig, columns: list[str], labelled: bool) -> None:
    """Import the function in a child process and compare its parameters with what the data has."""
    if not config.function:
        raise ConfigError("reward.function is empty: give --reward math, exact, regex, file.py:f or package.module:f")
    try:
        child = subprocess.run(
            command(config), input="", capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"reward.function={config.function}: importing it took more than {START_SECONDS} s") from None
    try:
        takes = json.loads(child.stdout.splitlines()[0])
    except (IndexError, json.JSONDecodeError):
        raise ConfigError(f"reward.function={config.function}: its process died at import: {child.stderr}") from None
    if "error" in takes:
        raise ConfigError(f"reward.function={config.function}: {takes['error']}\n{takes.get('traceback', '')}".strip())
    optional = {"label": labelled, "pattern": config.pattern is not None}
    available = {*ALWAYS_GIVEN, *columns, *(name for name, given in optional.items() if given)}
    missing = [name for name in takes["required"] if name not in available]
    if missing:
        raise ConfigError(
            f"reward.function={config.function}: no value for its parameter {missing[0]!r}; a reward is given "
            f"{', '.join(sorted(available))}: rename the parameter, "
            "give it a default, or name its column (data.label_column, reward.pattern)"
        )


class RewardPool:
    """`processes` children; a call waits for a free one, and a child that dies or hangs is replaced."""

    def __init__(self, config: RewardConfig, log: Path) -> None:
        self.config, self.log, self.closed = config, log, False
        self.free: asyncio.Queue[Child | None] = asyncio.Queue()
        self.children: set[Child] = set()
        for _ in range(config.processes):
            self.free.put_nowait(None)

    async def score(self, call: dict[str, Any]) -> float:
        child = await self.free.get()
        if self.closed:
            raise RewardFailure("the reward processes were stopped")
        healthy: Child | None = None
        try:
            child = child or await self._start()
            answer = await child.ask(call, self.config.timeout_seconds)
            healthy = child
        finally:
            if child is not None and healthy is None:
                self._discard(child)
            self.free.put_nowait(healthy)
        if "error" in answer:
            raise RewardFailure(answer["error"])
        return float(answer["reward"])

    async def _start(self) -> "Child":
        child = await Child.start(self.config, self.log)
        self.children.add(child)
        return child

    def _discard(self, child: "Child") -> None:
        self.children.discard(child)
        child.kill()

    async def stop(self) -> None:
        self.closed = True
        children, self.children = self.children, set()
        for child in children:
            child.kill()
            await child.process.wait()


class Child:
    def __init__(self, process: asyncio.subprocess.Process, constants: dict[str, Any]) -> None:
        self.process, self.constants = process, constants

    @classmethod
    async def start(cls, config: RewardConfig, log: Path) -> "Child":
        with log.open("a") as output:
            process = await asyncio.create_subprocess_exec(
                *command(config),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                limit=LONGEST_LINE,
                start_new_session=True,
            )
        child = cls(process, {"pattern": config.pattern} if config.pattern is not None else {})
        try:
            hello = await child._answer(START_SECONDS)
        except RewardFailure:
            child.kill()
            raise
        if "error" in hello:
            raise RewardFailure(hello["error"])
        return child

    async def ask(self, call: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        line = json.dumps({**call, **self.constants}, default=str) + "\n"
        try:
            self.process.stdin.write(line.encode())
            await self.process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise RewardFailure(await self._obituary()) from None
        return await self._answer(timeout_seconds)

    async def _answer(self, timeout_seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), timeout_seconds)
        except TimeoutError:
            raise RewardTimeout(f"the reward function took more than {timeout_seconds:g} s") from None
        if not line:
            raise RewardFailure(await self._obituary())
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    async def _obituary(self) -> str:
        return f"the reward process died with exit status {await self.process.wait()}"

    def kill(self) -> None:
        """The child leads a session of its own: what it started ends with it."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it may have just died by itself
                os.killpg(self.process.pid, signal.SIGKILL)
