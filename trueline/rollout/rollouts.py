"""A bounded first-in first-out line of prompt groups, filled in the background."""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from trueline.data.loader import Mixture, Order
from trueline.data.types import Prompt, Trajectory
from trueline.environments.base import Environment
from trueline.rollout.engine import SamplingParams
from trueline.rollout.episode import Episodes, Ticket

STOP_SECONDS = 10
Result = TypeVar("Result")
Group = list[Trajectory]


class RolloutFailure(RuntimeError):
    """Sampling cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How many groups of how many answers are under way at most, and what is tolerated."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    seed: int
    seeded: bool
    max_failure_share: float

    def capacity(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_step


@dataclass(slots=True)
class Failures:
    """Episodes that ended without a reward since the last step."""

    count: int = 0
    dropped_groups: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, failed: list[Trajectory]) -> None:
        self.count += len(failed)
        self.reasons.update(f"{one.outcome}: {one.error.strip()}" for one in failed)

    def summary(self) -> str:
        return "\n".join(f"{count} x {reason}" for reason, count in self.reasons.most_common(3))


class EventLoop:
    """An event loop in a thread of its own, for a controller that is not asynchronous."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="rollouts", daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, Result], what: str) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(self.timeout_seconds)
        except FutureTimeout:
            future.cancel()
            raise RolloutFailure(f"{what}: not done within timeout_seconds={self.timeout_seconds:.0f}") from None

    def stop(self) -> None:
        """End what still runs, then the loop and its thread."""
        asyncio.run_coroutine_threadsafe(cancel_others(), self.loop).result(STOP_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(STOP_SECONDS)
        self.loop.close()


async def cancel_others() -> None:
    """Python 3.11's `wait_for` loses a cancellation that meets a result, so it is asked for until it is heard."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=0.2)


class Rollouts:
    """A group keeps its place until the weights trained on it are live (`release`), so no trained answer
    lags more than `max_staleness` versions. With 0 nothing is sampled while training: synchronous RL.
    """

    def __init__(
        self,
        episodes: Episodes,
        environment: Callable[[], Environment],
        prompts: list[Prompt],
        order: Order | Mixture,
        params: SamplingParams,
        plan: RolloutPlan,
        loop: EventLoop,
    ) -> None:
        self.episodes, self.environment, self.prompts, self.order = episodes, environment, prompts, order
        self.params, self.plan, self.loop = params, plan, loop
        self.running: deque[asyncio.Task[Group]] = deque()
        self.failures = Failures()

    def start(self) -> None:
        self.loop.run(self._admit(self.plan.capacity()), "starting rollouts")

    def release(self, count: int) -> None:
        """Admit `count` new groups; called once the new weights are live."""
        self.failures = Failures()
        self.loop.run(self._admit(count), "admitting prompts")

    def take(self, count: int) -> list[Group]:
        """Wait for the oldest `count` groups that can be trained on."""
        return self.loop.run(self._take(count), f"sampling {count} groups of {self.plan.group_size} answers")

    async def _admit(self, count: int) -> None:
        for _ in range(count):
            number = self.order.position
            prompt = self.prompts[next(self.order)]
            self.running.append(asyncio.create_task(self._sample_group(prompt, number)))

    async def _sample_group(self, prompt: Prompt, number: int) -> Group:
        tickets = [Ticket(number, index, self.seed_of(number, index)) for index in range(self.plan.group_size)]
        runs = [self.episodes.run(self.environment(), prompt, ticket, self.params) for ticket in tickets]
        return list(await asyncio.gather(*runs))

    def seed_of(self, group: int, index: int) -> int | None:
        if not self.plan.seeded:
            return None
        return int(np.random.SeedSequence([self.plan.seed, group, index]).generate_state(1)[0]) >> 1

    async def _take(self, count: int) -> list[Group]:
        ready: list[Group] = []
        while len(ready) < count:
            group = await self.running.popleft()
            survivors = [trajectory for trajectory in group if not trajectory.outcome.failed]
            self._count_failures([trajectory for trajectory in group if trajectory.outcome.failed])
            if len(survivors) >= min(2, self.plan.group_size):
                ready.append(survivors)
            else:
                self.failures.dropped_groups += 1
                await self._admit(1)
        return ready

    def _count_failures(self, failed: list[Trajectory]) -> None:
        self.failures.add(failed)
        answers = self.plan.groups_per_step * self.plan.group_size
        if self.failures.count > self.plan.max_failure_share * answers:
            raise RolloutFailure(
                f"{self.failures.count} of {answers} answers of this step have no reward, more than "
                f"reward.max_failure_share={self.plan.max_failure_share:g}. Most frequent:\n{self.failures.summary()}"
            )
