"""All engines of a run as one."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate

from trueline.data.types import Completion
from trueline.rollout.engine import RolloutEngine, SamplingParams
from trueline.runtime.actors import Actor, Given, Result


class EnginePool:
    """Completions of one prompt come from one engine, which then computes the prompt once."""

    def __init__(self, actors: Sequence[Actor[RolloutEngine]]) -> None:
        self.actors = actors

    async def generate(self, tokens: list[int], params: SamplingParams, group: int, request: str) -> Completion:
        actor = self.actors[group % len(self.actors)]
        return await actor.call(RolloutEngine.generate, tokens, params, request)

    async def call(
        self,
        method: Callable[Concatenate[RolloutEngine, Given], Coroutine[Any, Any, Result]],
        *args: Given.args,
        **named: Given.kwargs,
    ) -> list[Result]:
        """Make the same call on every engine, and return the results in their order."""
        return list(await asyncio.gather(*(actor.call(method, *args, **named) for actor in self.actors)))

    def stop(self) -> None:
        for actor in self.actors:
            actor.stop()
