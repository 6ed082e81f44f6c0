"""All engines of a run as one."""

import asyncio
from collections.abc import Sequence
from typing import Any

from trueline.data.types import Completion
from trueline.rollout.engine import SamplingParams
from trueline.runtime.actors import Actor


class EnginePool:
    """Answers to one prompt go to one engine, which then computes the prompt once."""

    def __init__(self, actors: Sequence[Actor]) -> None:
        self.actors = actors

    async def generate(self, tokens: list[int], params: SamplingParams, group: int, request: str) -> Completion:
        actor = self.actors[group % len(self.actors)]
        completion = await actor.call("generate", tokens, params, request)
        assert isinstance(completion, Completion)
        return completion

    async def call(self, method: str, *args: Any) -> list[Any]:
        """The same call on every engine."""
        return list(await asyncio.gather(*(actor.call(method, *args) for actor in self.actors)))

    def stop(self) -> None:
        for actor in self.actors:
            actor.stop()
