"""Reward functions in processes of their own, with a deadline that kills."""

import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.rewards.base import Call, PolicyError, RewardFailure, RewardTimeout
from trueline.rewards.child import ChildProcess, end_of
from trueline.rewards.code import SECONDS, TRIAL
from trueline.rewards.functions import REWARDS
from trueline.rewards.process import CONVERSATIONAL, Takes, values_of

ALWAYS_GIVEN = ("reply", "replies", "prompt", "messages", "turns")
START_SECONDS = 60
FromChild = dict[str, Any]
Probe = Callable[["FunctionReward", Takes], Awaitable[None]]


def check_function(
    part: RewardPartConfig, config: RewardConfig, examples: dict[str, Call], probe: Probe | None = None
) -> Takes:
    """Import the function in a child process, compare its parameters with what it would be given, and return them.

    Examples are calls by the data that they come from. A probe makes calls of its own in the same process.
    """
    if not part.function:
        raise ConfigError(
            f"reward.function is empty: give --reward {', '.join(REWARDS)}, file.py:f or package.module:f"
        )
    if "," in part.function:
        raise ConfigError(
            f"reward.function={part.function} is one reward: name several with reward.parts.NAME.function="
        )
    seconds = part.options.get("seconds", SECONDS)
    if part.function == "code" and isinstance(seconds, int | float) and seconds >= config.timeout_seconds:
        raise ConfigError(
            f"reward.options.seconds={seconds:g} must be below reward.timeout_seconds={config.timeout_seconds:g}, or "
            "code that does not end counts as a failure of the reward: lower the one or raise the other"
        )
    with ThreadPoolExecutor(1) as thread:  # a notebook runs an event loop in this one
        return thread.submit(asyncio.run, describe(part, config, examples, probe)).result()


async def describe(
    part: RewardPartConfig, config: RewardConfig, examples: dict[str, Call], probe: Probe | None
) -> Takes:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "reward.log")
        reward = FunctionReward(part, config.replaced({"processes": 1}), log)
        (child,) = reward.children
        try:
            await child.start()
            if part.function == "code":
                await try_code(child)
            check_parameters(part, child.takes, examples)
            if probe is not None:
                await probe(reward, child.takes)
        except RewardFailure as error:
            last_words = "" if child.takes else log.read_text(errors="replace")
            raise ConfigError(f"{error}\n{last_words}".strip()) from None
        finally:
            await reward.stop()
        return child.takes


def check_parameters(part: RewardPartConfig, takes: Takes, examples: dict[str, Call]) -> None:
    for source, example in examples.items():
        available = given_names(part, takes, example)
        missing = [name for name in takes["required"] if name not in available]
        if missing:
            known = f" with rows of {source}" if len(examples) > 1 else ""
            raise ConfigError(
                f"reward.function={part.function}: no value for its parameter {missing[0]!r}; a reward is given "
                f"{', '.join(sorted(available))}{known}: rename the parameter, "
                "give it a default, or name its column or value (data.label_column, reward.pattern, reward.options)"
            )
    idle = [name for name in part.options if name in ALWAYS_GIVEN or not (takes["any"] or name in takes["all"])]
    if idle:
        raise ConfigError(
            f"reward.function={part.function}: reward.options has {idle[0]!r}, which is none of the parameters "
            f"that options can fill ({', '.join(name for name in takes['all'] if name not in ALWAYS_GIVEN)})"
        )


def given_names(part: RewardPartConfig, takes: Takes, example: Call) -> set[str]:
    """Return the names that a function's parameters can have; a label that the row has not is no value."""
    call = {name: value for name, value in example.items() if name != "label" or value is not None}
    return {*ALWAYS_GIVEN, *values_of(takes, [call]), *part.constants()} - {CONVERSATIONAL}


async def try_code(child: "Child") -> None:
    [answer] = await child.ask([TRIAL])
    if "reward" not in answer:
        reason = str(answer.get("error") or answer["policy_error"]).rpartition("\n")[2]
        raise RewardFailure(f"reward.function=code: {reason}")


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    call: Call
    reward: asyncio.Future[float]

    def settle(self, outcome: float | Exception) -> None:
        if self.reward.done():
            return  # whoever asked has gone
        if isinstance(outcome, Exception):
            self.reward.set_exception(outcome)
        else:
            self.reward.set_result(outcome)


class FunctionReward:
    """A reward function in `processes` children; a call waits for a free one; one that dies or hangs is replaced."""

    def __init__(self, part: RewardPartConfig, config: RewardConfig, log: Path) -> None:
        self.part, self.config, self.closed = part, config, False
        self.children = [Child(part, config, log) for _ in range(config.processes)]
        self.line: asyncio.Queue[Waiting] = asyncio.Queue()
        self.unsettled: set[Waiting] = set()
        self.workers: list[asyncio.Task[None]] = []

    async def score(self, call: Call) -> float:
        if self.closed:
            raise RewardFailure("the reward processes were stopped")
        if not self.workers:
            self.workers = [asyncio.create_task(self._work(child)) for child in self.children]
        waiting = Waiting(call, asyncio.get_running_loop().create_future())
        self.unsettled.add(waiting)
        self.line.put_nowait(waiting)
        try:
            return await waiting.reward
        finally:
            self.unsettled.discard(waiting)

    async def _work(self, child: "Child") -> None:
        while True:
            first = await self.line.get()
            try:
                await child.start()
            except RewardFailure as failure:
                first.settle(failure)
                continue
            more = min(self.line.qsize(), self.config.batch - 1) if child.takes["batched"] else 0
            batch = [first, *(self.line.get_nowait() for _ in range(more))]
            wanted = [waiting for waiting in batch if not waiting.reward.done()]
            if wanted:
                await self._answer(child, wanted)

    async def _answer(self, child: "Child", batch: list[Waiting]) -> None:
        """Settle all calls of a batch; a function that hangs or dies is asked again, for each call by itself."""
        try:
            answers = await child.ask([waiting.call for waiting in batch])
        except RewardFailure as failure:
            if len(batch) == 1:
                batch[0].settle(failure)
                return
            for waiting in batch:  # one of them is the culprit; the others shall not fail with it
                await self._answer(child, [waiting])
            return
        for waiting, answer in zip(batch, answers, strict=True):
            waiting.settle(self._outcome(answer))

    def _outcome(self, answer: FromChild) -> float | Exception:
        if "reward" in answer:
            return float(answer["reward"])
        if "policy_error" in answer:
            return PolicyError(answer["policy_error"])
        limit = f"out of memory (reward.memory_gib={self.config.memory_gib:g})\n" if answer.get("exhausted") else ""
        return RewardFailure(f"reward.function={self.part.function}: {limit}{answer['error']}")

    async def stop(self) -> None:
        self.closed = True
        for worker in self.workers:
            worker.cancel()
        await asyncio.gather(*self.workers, return_exceptions=True)
        for waiting in self.unsettled:
            waiting.settle(RewardFailure("the reward processes were stopped"))
        for child in self.children:
            await child.stop()


class Child(ChildProcess):
    """One process of a reward function, started when it is needed and again after it was killed."""

    def __init__(self, part: RewardPartConfig, config: RewardConfig, log: Path) -> None:
        command = [sys.executable, "-m", "trueline.rewards.process", part.function, str(config.memory_gib)]
        super().__init__(command, log)
        self.part, self.config = part, config
        self.takes: dict[str, Any] = {}

    async def start(self) -> None:
        if self.runs():
            return
        self.kill()  # it may have died between two calls
        try:
            await self.open()
        except OSError as error:
            raise self._failure(f"its process cannot be started: {error}") from None
        self.takes = await self._exchange(None, START_SECONDS)
        if "error" in self.takes:
            self.kill()
            raise self._failure(self.takes["error"])

    async def ask(self, calls: list[Call]) -> list[FromChild]:
        await self.start()
        try:
            line = json.dumps({"calls": calls, "constants": self.part.constants()}, default=str)
        except (TypeError, ValueError) as error:
            raise self._failure(f"its call cannot be sent as JSON: {error}") from None
        answers: list[FromChild] = (await self._exchange(line, self.config.timeout_seconds))["answers"]
        if any(answer.get("exhausted") for answer in answers):
            self.kill()  # what leaked stays in the process
        return answers

    async def _exchange(self, line: str | None, seconds: float) -> dict[str, Any]:
        """Send one line, and return the one that comes back; a child that fails at it is killed."""
        process, heard = self.process, False
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                if line is not None:
                    process.stdin.write(line.encode() + b"\n")
                    await process.stdin.drain()
                answer: dict[str, Any] = json.loads(await process.stdout.readline())
                heard = True
                return answer
        except TimeoutError:
            what = "its import" if line is None else "a call (reward.timeout_seconds)"
            raise self._failure(f"{what} took more than {seconds:g} s and was killed", RewardTimeout) from None
        except (ConnectionError, json.JSONDecodeError):
            self.kill()
            raise self._failure(f"its process {await end_of(process)} (see {self.log.name})") from None
        except ValueError as error:  # a line above the limit
            raise self._failure(f"its answer cannot be read: {error}") from None
        finally:
            if not heard:
                self.kill()

    def _failure(self, reason: str, kind: type[RewardFailure] = RewardFailure) -> RewardFailure:
        return kind(f"reward.function={self.part.function}: {reason}")
