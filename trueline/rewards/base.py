"""What rollouts need from a reward, and how a reward scores waiting calls in batches."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trueline.usercode.failures import PolicyError as PolicyError  # users import it from here

LONGEST_CAUSE = 300  # characters of a failure in one line
Call = dict[str, Any]  # reply, prompt, messages, label and the columns of the row
IMAGES = "images"  # in a call: the pictures of its prompt, as data URLs; a function gets them as PIL's images


class RewardFailure(RuntimeError):
    """There is no reward. It is never turned into a number."""

    def __init__(self, reason: str, function: str = "") -> None:
        self.reason = reason
        self.part = ""  # its name among the rewards of the run
        super().__init__(f"reward.function={function}: {reason}" if function else reason)


class RewardTimeout(RewardFailure):
    """The reward took longer than reward.timeout_seconds."""


class RewardUnreachable(RewardFailure):
    """A scorer or LLM judge could not be reached: the network's or the server's fault, not the completion's."""


def short_cause(error: str) -> str:
    """Return the last line of an error; of a traceback, also the place in the user's own files that it came from."""
    places = re.findall(r'File "(.+)", line (\d+)', error)
    own = [place for place in places if "/lib/python3" not in place[0] and not place[0].startswith("<")] or places
    where = f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""
    return f"{error.rstrip().rpartition(chr(10))[2]:.{LONGEST_CAUSE}}{where}"


@dataclass(frozen=True, slots=True)
class Graded:
    """A reward with metrics of its own, by their names in transcripts."""

    reward: float
    metrics: dict[str, float]


class Reward(Protocol):
    async def score(self, call: Call) -> float | Graded:
        """Return the reward, or raise PolicyError, or RewardFailure and its kinds."""

    async def stop(self) -> None:
        """Give back processes and connections."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    reward: float  # the task reward of one completion
    parts: dict[str, float] = field(default_factory=dict)  # each reward by its name, before its weight
    policy_error: str = ""  # why the completion got reward.policy_error instead
    metrics: dict[str, float] = field(default_factory=dict)  # that rewards report besides; of several, as METRIC/PART


Score = float | Graded | RewardFailure  # of one call of a batch
ScoreBatch = Callable[[list[Call]], Awaitable[list[Score]]]


class BatchedReward:
    """Collects up to `batch` calls in a batch, and scores `lanes` batches at a time while the next one fills."""

    def __init__(
        self, score_batch: ScoreBatch, batch: int, lanes: int, close: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.score_batch, self.batch, self.close = score_batch, batch, close
        self.lanes = asyncio.Semaphore(lanes)
        self.open: list[Call] = []  # the batch that calls can still join; not empty while it waits
        self.tasks: list[asyncio.Task[list[Score]]] = []  # the last one is that of the open batch
        self.stopped = False

    async def score(self, call: Call) -> float | Graded:
        if self.stopped:
            raise RewardUnreachable("stopped before a call was made")
        if not self.open or len(self.open) == self.batch:
            self.open = []
            self.tasks = [task for task in self.tasks if not task.done()]
            self.tasks.append(asyncio.create_task(self._score_later(self.open)))
        task, place = self.tasks[-1], len(self.open)
        self.open.append(call)
        await asyncio.wait({task})  # a caller that gives up must not cancel the task for others
        if task.cancelled():
            raise RewardUnreachable("stopped while a call was waiting")
        scored = task.result()[place]
        if isinstance(scored, RewardFailure):
            raise scored
        return scored

    async def _score_later(self, calls: list[Call]) -> list[Score]:
        async with self.lanes:
            if self.open is calls:
                self.open = []
            return await self.score_batch(calls)

    async def stop(self) -> None:
        self.stopped = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.close is not None:
            await self.close()
