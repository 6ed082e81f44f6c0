"""Calls that wait at the same time are worked on together."""

import asyncio
from collections.abc import Awaitable, Callable

from trueline.rewards.base import Call, RewardFailure, RewardUnreachable

Scored = float | RewardFailure  # what became of one call of a batch
Work = Callable[[list[Call]], Awaitable[list[Scored]]]


class Gathering:
    """Up to `batch` calls make a batch, and `lanes` batches are worked on at a time; the next one fills meanwhile."""

    def __init__(self, work: Work, batch: int, lanes: int) -> None:
        self.work, self.batch = work, batch
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
