"""A bounded first-in first-out line of prompt groups, filled in the background."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from trueline.config.algorithm import DynamicSamplingConfig
from trueline.data.loader import Mixture, Order
from trueline.data.types import Prompt, Trajectory
from trueline.rollout.failures import FailureBudget, NothingToLearn, RolloutFailure
from trueline.rollout.groups import Group, GroupSampler
from trueline.runtime.event_loop import EventLoop

SAME_REWARD = 1e-6


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How many groups are under way at most, and which of them are trained on."""

    prompts_per_step: int
    max_staleness: int
    dynamic: DynamicSamplingConfig = DynamicSamplingConfig()

    def capacity(self) -> int:
        return (self.max_staleness + 1) * self.prompts_per_step


@dataclass(slots=True)
class Dropped:
    """What was sampled since the last step and is not trained on."""

    part: str | None = None  # reward that dynamic sampling judges by
    completions: int = 0  # that failed
    groups: int = 0  # with too few completions left
    uniform: list[float] = field(default_factory=list)  # the one reward of each group that had only one

    def group_count(self) -> int:
        return self.groups + len(self.uniform)


class Rollouts:
    """A group keeps its place until the weights trained on it are live (`release`), so no trained completion
    lags more than `max_staleness` policy versions. With 0 nothing is sampled while training: synchronous RL.
    """

    def __init__(
        self,
        sampler: GroupSampler,
        prompts: list[Prompt],
        order: Order | Mixture,
        plan: RolloutPlan,
        budget: FailureBudget,
        loop: EventLoop,
    ) -> None:
        self.sampler, self.prompts, self.order = sampler, prompts, order
        self.plan, self.budget, self.loop = plan, budget, loop
        self.running: deque[asyncio.Task[Group]] = deque()
        self.dropped = Dropped(plan.dynamic.reward)

    def start(self) -> None:
        self.loop.run(self._admit(self.plan.capacity()), "starting rollouts")

    def release(self) -> None:
        """Admit new groups in place of those taken, once the new weights are live."""
        self.dropped = Dropped(self.plan.dynamic.reward)
        self.loop.run(self._admit(self.plan.capacity() - len(self.running)), "admitting prompts")

    def take(self, count: int) -> list[Group]:
        """Wait for the oldest `count` groups that can be trained on; fewer if dynamic sampling finds no more."""
        return self.loop.run(self._take(count), "taking groups", bounded=False)

    async def _admit(self, count: int) -> None:
        for _ in range(count):
            number = self.order.position
            prompt = self.prompts[next(self.order)]
            self.running.append(asyncio.create_task(self.sampler.sample((number, prompt), number)))

    async def _take(self, count: int) -> list[Group]:
        ready: list[Group] = []
        left = count * self.plan.dynamic.max_batches
        while len(ready) < count and (left > 0 or not self.plan.dynamic.enabled):
            group = await self._next()
            left -= 1
            if self._trainable(group):
                ready.append([trajectory for trajectory in group if not trajectory.outcome.failed])
            elif left > len(self.running) or not self.plan.dynamic.enabled:
                await self._admit(1)
        if not ready:
            raise NothingToLearn(
                f"none of {count * self.plan.dynamic.max_batches} groups has answers with different rewards: choose "
                "prompts of another difficulty, or set algorithm.dynamic_sampling.enabled=false"
            )
        return ready

    async def _next(self) -> Group:
        """Wait for the oldest group; this wait is bounded, not that for a whole step."""
        oldest, seconds = self.running.popleft(), self.loop.timeout_seconds
        done, _ = await asyncio.wait({oldest}, timeout=seconds)
        if not done:
            oldest.cancel()
            raise RolloutFailure(
                f"sampling {self.sampler.size} answers to a prompt: not done within timeout_seconds={seconds:.0f}"
            )
        return oldest.result()

    def _trainable(self, group: Group) -> bool:
        """Count failures, and tell whether enough rewards are left and, under dynamic sampling, different ones."""
        failed = self.budget.add(group)
        self.dropped.completions += failed
        if len(group) - failed < min(2, self.sampler.size):
            self.dropped.groups += 1
            return False
        if not self.plan.dynamic.enabled:
            return True
        rewards = [part_reward(one, self.plan.dynamic.reward) for one in group if not one.outcome.failed]
        if max(rewards) - min(rewards) > SAME_REWARD:
            return True
        self.dropped.uniform.append(rewards[0])
        return False


def part_reward(trajectory: Trajectory, part: str | None) -> float:
    """Return the reward of one part, or the whole one where the completion's own error left that part without one."""
    assert trajectory.reward is not None
    return trajectory.metrics.get(f"reward/{part}", trajectory.reward)
