"""A taskset of verifiers from 0.4 on: one turn, which is scored."""

import os
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["Counting"]


class Sum(vf.TaskData):
    answer: str


class CountingTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace: Any) -> float:
        if trace.last_reply == "raises":
            raise KeyError("no scorer")
        if trace.last_reply == "dies":
            os._exit(3)
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def size(self, trace: Any) -> float:
        return float(len(trace.last_reply))


class Counting(vf.Taskset[CountingTask]):
    def load(self) -> Iterator[CountingTask]:
        for number in range(3):
            yield CountingTask(Sum(prompt=f"{number}+1=", answer=str(number + 1)), self.config.task)
