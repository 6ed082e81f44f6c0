"""What rollout asks of a reward, and how a reward works on calls together that wait at the same time."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

LONGEST_WORDS = 300  # characters of a failure in one line
Call = dict[str, Any]  # reply, prompt, messages, label and the columns of the row


class RewardFailure(RuntimeError):
    """A reward could not be had. It is never turned into a number."""


class RewardTimeout(RewardFailure):
    """The reward took longer than reward.timeout_seconds."""


class RewardUnreachable(RewardFailure):
    """A scorer or LLM judge could not be reached: the network's or the server's fault, not the completion's."""


class PolicyError(Exception):
    """Reward functions raise it where the completion itself is at fault, which gets reward.policy_error and counts."""


def last_words(error: str) -> str:
    """Return the last line of a failure; of a traceback, also the place in the user's own files that it came from."""
    places = re.findall(r'File "(.+)", line (\d+)', error)
    own = [place for place in places if "/lib/python3" not in place[0] and not place[0].startswith("<")] or places
    where = f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""
    return f"{error.rstrip().rpartition(chr(10))[2]:.{LONGEST_WORDS}}{where}"


class Reward(Protocol):
    async def score(self, call: Call) -> float:
        """Return the reward, or raise PolicyError, or RewardFailure and its kinds."""

    async def stop(self) -> None:
        """Give back processes and connections."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The task reward of one completion and what it is made of."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)  # each reward by its name, before its weight
    policy_error: str = ""  # why the completion got reward.policy_error instead


Scored = float | RewardFailure  # what became of one call of a batch
Work = Callable[[list[Call]], Awaitable[list[Scored]]]


class Gathering:
    """Gather up to `batch` calls in a batch, and work on `lanes` batches at a time, while the next one fills."""

    def __init__(self, work: Work, batch: int, lanes: int, close: Callable[[], Awaitable[None]] | None = None) -> None:
        self.work, self.batch, self.close = work, batch, close
        self.lanes = asyncio.Semaphore(lanes)
        self.open: list[Call] = []  # the batch that calls can still join; it is never empty while it waits
        self.tasks: list[asyncio.Task[list[Scored]]] = []  # the last one is that of the open batch
        self.stopped = False

    async def score(self, call: Call) -> float:
        task, place = self._join(call)
        await asyncio.wait({task})  # not the task itself: a caller that gives up must not end it for the others
        if task.cancelled():
            raise RewardUnreachable("stopped while a call was waiting")
        scored = task.result()[place]
        if isinstance(scored, RewardFailure):
            raise scored
        return scored

    def _join(self, call: Call) -> tuple[asyncio.Task[list[Scored]], int]:
        if self.stopped:
            raise RewardUnreachable("stopped before a call was made")
        if not self.open or len(self.open) == self.batch:
            self.open = []
            self.tasks = [task for task in self.tasks if not task.done()]
            self.tasks.append(asyncio.create_task(self._work_on(self.open)))
        self.open.append(call)
        return self.tasks[-1], len(self.open) - 1

    async def _work_on(self, calls: list[Call]) -> list[Scored]:
        async with self.lanes:
            if self.open is calls:
                self.open = []
            return await self.work(calls)

    async def stop(self) -> None:
        self.stopped = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.close is not None:
            await self.close()
