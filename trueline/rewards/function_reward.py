"""Reward functions in processes of their own, with a deadline that kills."""

import asyncio
import tempfile
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trueline.config.base import ConfigError
from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.rewards.base import IMAGES, Call, PolicyError, RewardFailure, RewardTimeout
from trueline.rewards.code import TRIAL
from trueline.rewards.functions import REWARDS
from trueline.rewards.scoring import CONVERSATIONAL, Result, RewardCode, is_batched, values_of
from trueline.usercode.failures import CallTimeout, UserCodeFailure
from trueline.usercode.host import ChildProcess, Host, UserCode
from trueline.usercode.loading import Parameters
from trueline.usercode.sandbox import CODE_SECONDS

ALWAYS_GIVEN = ("reply", "replies", "prompt", "messages", "turns")
Probe = Callable[["FunctionReward", Parameters], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A reward function that a check has loaded; the run takes its process over, or closes it."""

    parameters: Parameters
    process: ChildProcess

    def close(self) -> None:
        self.process.kill()
        self.process.log.unlink(missing_ok=True)


def check_function(
    part: RewardPartConfig, config: RewardConfig, examples: dict[str, Call], probe: Probe | None = None
) -> LoadedFunction:
    """Load the function in a process, and compare its parameters with calls by their data; a probe makes more calls."""
    if not part.function:
        names = ", ".join(REWARDS)
        raise ConfigError(f"reward.function is empty: give --reward {names}, file.py:f or package.module:f")
    if "," in (given := part.function):
        raise ConfigError(f"reward.function={given} names one reward: name several with reward.parts.NAME.function=")
    seconds = part.options.get("seconds", CODE_SECONDS)
    if part.function == "code" and isinstance(seconds, int | float) and seconds >= config.timeout_seconds:
        raise ConfigError(
            f"reward.options.seconds={seconds:g} must be below reward.timeout_seconds={config.timeout_seconds:g}, or "
            "code that does not end counts as a failure of the reward: lower the one or raise the other"
        )
    with ThreadPoolExecutor(1) as thread:  # a notebook runs an event loop in this one
        return thread.submit(asyncio.run, load_checked(part, config, examples, probe)).result()


async def load_checked(
    part: RewardPartConfig, config: RewardConfig, examples: dict[str, Call], probe: Probe | None
) -> LoadedFunction:
    log = Path(tempfile.mkstemp(prefix="trueline-reward-", suffix=".log")[1])
    reward = FunctionReward(part, config.with_keys({"processes": 1}), log)
    (host,) = reward.hosts
    loaded: LoadedFunction | None = None
    try:
        await host.start()
        parameters = Parameters(**host.about)
        if part.function == "code":
            await reward.score(TRIAL)  # it fails on a machine on which code cannot run
        check_parameters(part, parameters, examples)
        if probe is not None:
            await probe(reward, parameters)
        loaded = LoadedFunction(parameters, await host.release())
        weakref.finalize(loaded.process, log.unlink, missing_ok=True)  # if nobody takes it over or closes it
        return loaded
    except UserCodeFailure as error:
        printed = log.read_text(errors="replace")
        raise ConfigError(f"{error.subject}: {error.reason}\n{printed}".strip()) from None
    except (RewardFailure, PolicyError) as error:
        last_line = str(error).rpartition("\n")[2]
        raise ConfigError(f"reward.function={part.function}: {last_line}") from None
    finally:
        await reward.stop()
        if loaded is None or not loaded.process.is_running():
            log.unlink()


def check_parameters(part: RewardPartConfig, parameters: Parameters, examples: dict[str, Call]) -> None:
    for source, example in examples.items():
        available = given_names(part, parameters, example)
        if missing := [name for name in parameters.required if name not in available]:
            known = f" with rows of {source}" if len(examples) > 1 else ""
            raise ConfigError(
                f"reward.function={part.function}: no value for its parameter {missing[0]!r}; a reward is given "
                f"{', '.join(sorted(available))}{known}: rename the parameter, "
                "give it a default, or name its column or value (data.label_column, reward.pattern, reward.options)"
            )
    if idle := [name for name in part.options if name in ALWAYS_GIVEN or not parameters.takes(name)]:
        raise ConfigError(
            f"reward.function={part.function}: reward.options has {idle[0]!r}, which is none of the parameters "
            f"that options can fill ({', '.join(name for name in parameters.names if name not in ALWAYS_GIVEN)})"
        )


def given_names(part: RewardPartConfig, parameters: Parameters, example: Call) -> set[str]:
    """Return the names that a function's parameters can have; a label that the row has not is no value."""
    call = {name: value for name, value in example.items() if name != "label" or value is not None}
    asked = {IMAGES} & set(parameters.names)  # none, if a row has none
    return {*ALWAYS_GIVEN, *asked, *values_of(parameters, [call]), *part.constants()} - {CONVERSATIONAL}


@dataclass(frozen=True, slots=True, eq=False)
class QueuedCall:
    call: Call
    reward: asyncio.Future[float]

    def settle(self, outcome: float | Exception) -> None:
        if self.reward.done():
            return  # the caller is gone
        if isinstance(outcome, Exception):
            self.reward.set_exception(outcome)
        else:
            self.reward.set_result(outcome)


class FunctionReward:
    """A reward function in several processes; a call waits for a free one; one that dies or hangs is replaced."""

    def __init__(
        self, part: RewardPartConfig, config: RewardConfig, log: Path, loaded: LoadedFunction | None = None
    ) -> None:
        self.part, self.config, self.is_closed = part, config, False
        limits = config.timeout_seconds, config.memory_gib
        code = UserCode(RewardCode, [part.function], part.constants(), "reward", "function", *limits)
        first = Host(code, log, loaded.process if loaded else None)
        self.hosts = [first, *(Host(code, log) for _ in range(config.processes - 1))]
        self.queue: asyncio.Queue[QueuedCall] = asyncio.Queue()
        self.unsettled: set[QueuedCall] = set()
        self.workers: list[asyncio.Task[None]] = []
        self.unseen = ""  # what of a call the function does not take, and is too large to send

    async def score(self, call: Call) -> float:
        if self.is_closed:
            raise RewardFailure("the reward processes were stopped")
        if not self.workers:
            self.workers = [asyncio.create_task(self._work(host)) for host in self.hosts]
        queued = QueuedCall(call, asyncio.get_running_loop().create_future())
        self.unsettled.add(queued)
        self.queue.put_nowait(queued)
        try:
            return await queued.reward
        finally:
            self.unsettled.discard(queued)

    async def _work(self, host: Host) -> None:
        while True:
            first = await self.queue.get()
            try:
                await host.start()
            except UserCodeFailure as failure:
                first.settle(self._failure(failure))
                continue
            parameters = Parameters(**host.about)
            self.unseen = "" if parameters.takes(IMAGES) else IMAGES
            more = self.config.batch - 1 if is_batched(parameters) else 0
            batch = [first, *(self.queue.get_nowait() for _ in range(min(self.queue.qsize(), more)))]
            if wanted := [queued for queued in batch if not queued.reward.done()]:
                await self._score_batch(host, wanted)

    async def _score_batch(self, host: Host, batch: list[QueuedCall]) -> None:
        """Settle all calls of a batch; a function that hangs or dies is called again, for each call by itself."""
        try:
            calls = [{name: value for name, value in one.call.items() if name != self.unseen} for one in batch]
            results = await host.call(RewardCode.score, {"calls": calls})
        except UserCodeFailure as failure:
            if len(batch) == 1:
                batch[0].settle(self._failure(failure))
                return
            for queued in batch:  # one of them is the culprit; the others shall not fail with it
                await self._score_batch(host, [queued])
            return
        if any(result.get("exhausted") for result in results):
            host.child.kill()  # what leaked stays in the process
        for queued, result in zip(batch, results, strict=True):
            queued.settle(self._outcome(result))

    def _failure(self, failure: UserCodeFailure) -> RewardFailure:
        kind = RewardTimeout if isinstance(failure, CallTimeout) else RewardFailure
        return kind(failure.detail, self.part.function)

    def _outcome(self, result: Result) -> float | Exception:
        if "reward" in result:
            return float(result["reward"])
        if "policy_error" in result:
            return PolicyError(result["policy_error"])
        limit = f"out of memory (reward.memory_gib={self.config.memory_gib:g})\n" if result.get("exhausted") else ""
        return RewardFailure(f"{limit}{result['error']}", self.part.function)

    async def stop(self) -> None:
        self.is_closed = True
        for worker in self.workers:
            worker.cancel()
        await asyncio.gather(*self.workers, return_exceptions=True)
        for queued in self.unsettled:
            queued.settle(RewardFailure("the reward processes were stopped"))
        await asyncio.gather(*(host.stop() for host in self.hosts))
