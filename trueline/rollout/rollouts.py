"""A bounded line of prompt groups, filled in the background; what is ready is trained first, within the bound."""

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, field

from trueline.config.algorithm import DynamicSamplingConfig
from trueline.data.loader import Mixture, Order
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.rollout.failures import SMALLEST_WINDOW, EngineLost, FailureBudget, NothingToLearn, RolloutFailure
from trueline.rollout.groups import Group, GroupSampler
from trueline.rollout.ledger import Ledger
from trueline.runtime.event_loop import EventLoop

SAME_REWARD = 1e-6


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How many groups are under way at most, and which of them are trained on."""

    prompts_per_step: int
    max_staleness: int
    dynamic: DynamicSamplingConfig = DynamicSamplingConfig()
    drop_old: bool = False  # rather than wait for groups that will be too old after this step

    def capacity(self) -> int:
        return (self.max_staleness + 1) * self.prompts_per_step


@dataclass(slots=True)
class Dropped:
    """What was sampled since the last step, and is not trained on."""

    part: str | None = None  # reward that dynamic sampling judges by
    completions: int = 0  # that failed
    left_out: int = 0  # that a limit ended and nobody judged
    groups: int = 0  # with too few completions left
    too_old: int = 0  # groups that would have lagged too far behind
    uniform: list[float] = field(default_factory=list)  # the one reward of each group that had only one
    lengths: list[int] = field(default_factory=list)  # of all completions that were drawn, trained on or not
    metrics: list[dict[str, float]] = field(default_factory=list)  # that environments reported of those left out

    def group_count(self) -> int:
        return self.groups + self.too_old + len(self.uniform)


@dataclass(slots=True, eq=False)
class Flight:
    """A group that is being sampled, or waits to be trained on."""

    number: int
    born: int  # the policy version when it was admitted: no token of it is older
    task: asyncio.Task[Group]


class Rollouts:
    """A group keeps its place until the weights trained on it are live (`release`), so no trained token lags more
    than `max_staleness` policy versions. With 0 nothing is sampled while training: synchronous RL.
    """

    def __init__(
        self,
        sampler: GroupSampler,
        prompts: list[Prompt],
        order: Order | Mixture,
        plan: RolloutPlan,
        budget: FailureBudget,
        loop: EventLoop,
        ledger: Ledger,
    ) -> None:
        self.sampler, self.prompts, self.order = sampler, prompts, order
        self.plan, self.budget, self.loop, self.ledger = plan, budget, loop, ledger
        self.running: list[Flight] = []  # by their numbers
        self.again = sorted(ledger.under_way)  # drawn before, and without a fate
        self.version = 0
        self.ready: list[Group] = []  # that the step under way has so far
        self.looked_at = 0  # groups, for that step
        self.judged = self.useful = 0  # groups, for how many to draw under dynamic sampling
        self.left_out = self.failed = 0  # groups in a row
        self.dropped = Dropped(plan.dynamic.reward)

    def start(self, version: int) -> None:
        self.version = version
        self.loop.run(self._admit(self.plan.capacity()), "starting rollouts")

    def release(self, version: int) -> None:
        """Admit new groups in place of those taken, once the new weights are live."""
        self.version, self.dropped = version, Dropped(self.plan.dynamic.reward)
        self.loop.run(self._renew(), "admitting prompts")

    def take(self, count: int) -> list[Group]:
        """Wait for `count` groups that can be trained on; fewer if dynamic sampling finds no more.

        An interrupt breaks it off. Groups that were not trained on stay under way in the ledger.
        """
        return self.loop.run_until_interrupted(self._take(count), "taking groups")

    async def _renew(self) -> None:
        """Drop groups that are too old by now, and fill the line."""
        self.sampler.episodes.pool.deaths.clear()
        late = [flight for flight in self.running if self._last_version(flight) < self.version]
        self.dropped.lengths += [length for flight in late for length in self._drawn(flight)]
        self._end(late)
        self.ledger.close([flight.number for flight in late], "too_old")
        self.dropped.too_old = len(late)
        await self._admit(self.plan.capacity() - len(self.running))

    def _drawn(self, flight: Flight) -> list[int]:
        """Return the lengths of a group's completions; of one that is not done, of what updates have cut off of it."""
        if flight.task.done() and flight.task.exception() is None:
            return sampled_lengths(flight.task.result())
        under_way = self.sampler.episodes.pool.drawn.get(flight.number, Counter())
        return [tokens for name, tokens in under_way.items() if name.startswith(f"{self.sampler.purpose}-")]

    def _end(self, flights: list[Flight]) -> None:
        self.running = [flight for flight in self.running if flight not in flights]
        for flight in flights:
            flight.task.cancel()

    def _last_version(self, flight: Flight) -> int:
        """Return the last version of the policy that may be trained on this group."""
        return flight.born + self.plan.max_staleness

    async def _admit(self, count: int) -> None:
        for _ in range(count):
            number = self.again.pop(0) if self.again else self.ledger.draw(next(self.order))
            prompt = self.prompts[self.ledger.under_way[number]]
            task = asyncio.create_task(self.sampler.sample((number, prompt), number))
            self.running.append(Flight(number, self.version, task))

    async def _take(self, count: int) -> list[Group]:
        most, ready = count * self.plan.dynamic.max_batches, self.ready
        while len(ready) < count and (self.looked_at < most or not self.plan.dynamic.enabled):
            flight = await self._next(count - len(ready))
            self.looked_at += 1
            if self._trainable(flight):
                ready.append([one for one in flight.task.result() if one.outcome.scored])
            else:
                await self._admit(self._missing(count - len(ready), most - self.looked_at))
        self.ready, self.looked_at = [], 0
        if self.plan.max_staleness == 0:  # drawn ahead, and not needed: they come first in the next step
            self.again = sorted([*self.again, *(flight.number for flight in self.running)])
            self._end(self.running)
        if not ready:
            raise NothingToLearn(
                f"none of {count * self.plan.dynamic.max_batches} groups has answers with different rewards: choose "
                "prompts of another difficulty, or set algorithm.dynamic_sampling.enabled=false"
            )
        return sorted(ready, key=lambda group: group[0].group)

    def _missing(self, wanted: int, left: int) -> int:
        """Return how many groups to draw in place of one that is not trained on.

        Dynamic sampling of a synchronous run draws as many at once as will do if as few are useful as before.
        """
        if not self.plan.dynamic.enabled:
            return 1
        if self.plan.max_staleness:
            return int(left > len(self.running))
        likely = math.ceil(wanted * self.judged / max(self.useful, 1))
        return max(min(likely, left) - len(self.running), 0)

    async def _next(self, wanted: int) -> Flight:
        """Wait for a group; this wait is bounded, not that for a whole step."""
        waiting, seconds = self._eligible(wanted), self.loop.timeout_seconds
        pool = self.sampler.episodes.pool
        trouble = asyncio.create_task(pool.trouble.wait())
        tasks = {flight.task for flight in waiting} | {trouble}
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        trouble.cancel()
        if pool.lost:
            raise EngineLost("; ".join(pool.lost.values()))
        if not done:
            self._end(waiting)
            raise RolloutFailure(
                f"sampling {self.sampler.size} answers to a prompt: not done within timeout_seconds={seconds:.0f}"
            )
        flight = next(flight for flight in waiting if flight.task.done())
        self.running.remove(flight)
        return flight

    def _eligible(self, wanted: int) -> list[Flight]:
        """Return groups of which any may fill one of `wanted` places, such that none becomes too old by that.

        A synchronous run takes them in the order of the data, so that it can be repeated.
        """
        if self.plan.max_staleness == 0:
            return self.running[:1]
        if self.plan.drop_old:
            return self.running
        lasts = [self._last_version(flight) for flight in self.running]
        # Of the groups whose last version is `last` or before, later steps take so many; the others need places now.
        now = {last: sum(one <= last for one in lasts) - self._later(last) for last in lasts}
        urgent = [max((now[other] for other in now if other < last), default=0) for last in lasts]
        return [flight for flight, taken in zip(self.running, urgent, strict=True) if taken < wanted]

    def _later(self, last: int) -> int:
        return (last - self.version) * self.plan.prompts_per_step

    def _trainable(self, flight: Flight) -> bool:
        """Count failures, and tell whether enough rewards are left and, under dynamic sampling, different ones."""
        group = flight.task.result()
        failed = self.budget.add(group)
        self.judged += 1
        self.dropped.completions += failed
        left_out = [one for one in group if one.outcome is Outcome.LEFT_OUT]
        self.dropped.left_out += len(left_out)
        self.dropped.metrics += [one.metrics for one in left_out]
        self.dropped.lengths += sampled_lengths(group)
        fate = self._fate(group, failed)
        self.left_out = self.left_out + 1 if fate == "left_out" else 0
        if self.left_out > self.plan.prompts_per_step * self.plan.dynamic.max_batches:
            raise NothingToLearn(
                f"limits ended the episodes of {self.left_out} groups in a row ({last_limit(group)}), and environment."
                "truncated=drop leaves such episodes out: raise the limit, or set environment.truncated=judge"
            )
        self.failed = self.failed + 1 if fate == "failed" else 0
        if self.failed > SMALLEST_WINDOW:
            raise RolloutFailure(
                f"{self.failed} groups in a row have too few rewards to train on. {self.budget.explain()}"
            )
        if fate:
            self.ledger.close([flight.number], fate)
        self.useful += not fate
        return not fate

    def _fate(self, group: Group, failed: int) -> str:
        """Return why a group is not trained on, or nothing."""
        if sum(one.outcome.scored for one in group) < min(2, self.sampler.size):
            self.dropped.groups += 1
            return "failed" if failed else "left_out"
        if not self.plan.dynamic.enabled:
            return ""
        rewards = [part_reward(one, self.plan.dynamic.reward) for one in group if one.outcome.scored]
        if max(rewards) - min(rewards) > SAME_REWARD:
            return ""
        self.dropped.uniform.append(rewards[0])
        return "uniform"


def sampled_lengths(group: Group) -> list[int]:
    return [one.sampled_tokens() for one in group if not one.outcome.failed]


def last_limit(group: Group) -> str:
    return next(one.cut_off for one in reversed(group) if one.outcome is Outcome.LEFT_OUT)


def part_reward(trajectory: Trajectory, part: str | None) -> float:
    """Return the reward of one part, or the whole one where the completion's own error left that part without one."""
    assert trajectory.reward is not None
    return trajectory.metrics.get(f"reward/{part}", trajectory.reward)
