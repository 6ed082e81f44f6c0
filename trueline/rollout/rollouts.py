"""A bounded queue of prompt groups, filled in the background; ready groups are trained first."""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from statistics import fmean
from typing import Any

from trueline.config.algorithm import DynamicSamplingConfig
from trueline.config.base import ConfigError
from trueline.config.data import DifficultyConfig
from trueline.data.loader import Mixture, Order
from trueline.data.prompts import PromptTooLong
from trueline.data.types import Outcome, Prompt
from trueline.monitoring.ledger import Ledger
from trueline.rollout.failures import (
    SMALLEST_WINDOW,
    EngineLost,
    FailureBudget,
    NothingToLearn,
    RolloutFailure,
    UnusableData,
)
from trueline.rollout.groups import LengthBias, Sampler
from trueline.rollout.summary import Episode, SampledGroup
from trueline.runtime.event_loop import EventLoop

SAME_REWARD = 1e-6
MOST_TOO_LONG = MOST_SKIPPED = 10_000  # prompts in a row
EXAMINED = ("trained", "uniform", "failed", "left_out")  # fates of groups that were sampled and looked at


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    prompts_per_step: int
    max_staleness: int
    dynamic: DynamicSamplingConfig = DynamicSamplingConfig()
    drop_old: bool = False  # instead of waiting for groups that are about to expire
    extra_share: float | None = None  # groups in flight beyond those of a step, in steps; None: as `max_staleness`
    window: int | None = None  # groups drawn later that may be taken before one, and one more; None: any number
    difficulty: DifficultyConfig = DifficultyConfig()

    def capacity(self) -> int:
        extra = self.max_staleness if self.extra_share is None else self.extra_share
        return self.prompts_per_step + math.ceil(round(extra * self.prompts_per_step, 6))


@dataclass(slots=True)
class Dropped:
    """What was sampled since the last step and is not trained."""

    part: str | None = None  # reward that dynamic sampling compares
    completions: int = 0  # that failed
    left_out: int = 0  # truncated and without a reward
    groups: int = 0  # with too few completions left
    too_old: int = 0  # groups beyond the staleness bound
    too_long: int = 0  # prompts of a large dataset, which are measured when they are drawn
    uniform: list[float] = field(default_factory=list)  # the reward of each group with equal rewards
    lengths: list[int] = field(default_factory=list)  # of all sampled completions, trained or not
    metrics: list[dict[str, float]] = field(default_factory=list)  # environment metrics of those left out
    skipped: Counter[str] = field(default_factory=Counter)  # draws of resting rows, by fate
    woken: int = 0  # rows that came back early, since nearly all rested
    length_bias: float | None = None  # of an earlier step, known now

    def group_count(self) -> int:
        return self.groups + self.too_old + len(self.uniform)


@dataclass(slots=True, eq=False)
class InFlightGroup:
    number: int
    last_version: int  # of the policy that may be trained on it
    task: asyncio.Task[list[Any]]
    passed: int  # by groups that were drawn later


class Rollouts:
    """A group keeps its place until the weights trained on it are live (`release`), so no trained token lags more
    than `max_staleness` policy versions. With 0 nothing is sampled during training: synchronous RL.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts: Sequence[Prompt],
        order: Order | Mixture,
        plan: RolloutPlan,
        budget: FailureBudget,
        loop: EventLoop,
        ledger: Ledger,
    ) -> None:
        self.sampler, self.prompts, self.order = sampler, prompts, order
        self.plan, self.budget, self.loop, self.ledger = plan, budget, loop, ledger
        self.running: dict[int, InFlightGroup] = {}  # by number, in the order of admission
        self.expiring: Counter[int] = Counter()  # how many of these have each last version
        self.finished: dict[int, list[int]] = {}  # heaps of the numbers of those that are sampled, by last version
        self.has_finished, self.has_more = asyncio.Event(), asyncio.Event()  # the latter for a step that is streamed
        self.again = sorted(ledger.under_way)  # sampled before, without a fate
        self.version = 0
        self.ready: list[list[Any]] = []  # for the current step
        self.taking: asyncio.Task[list[Any]] | None = None  # waits for the groups of a step that is streamed
        self.given: set[int] = set()  # numbers of that step's groups that were given away before it was complete
        self.examined = 0  # groups for the current step
        self.bias = LengthBias()
        self.left_out = self.failed = 0  # groups in a row
        self.dropped = Dropped(plan.dynamic.reward)
        self.unusable: UnusableData | None = None  # ends the run when it is time to sample, after the step is reported

    def start(self, version: int) -> None:
        self.version = version
        self.loop.run(self._admit(self.plan.capacity()), "starting rollouts")

    def release(self, version: int) -> None:
        """Admit new groups in place of the trained ones, once the new weights are live."""
        self.version, self.dropped = version, Dropped(self.plan.dynamic.reward)
        self.loop.run(self._renew(), "admitting prompts")

    def take(self, count: int) -> list[Any]:
        """Wait for `count` trainable groups; return fewer if dynamic sampling finds no more.

        An interrupt cancels it. Groups that were not trained stay in flight in the ledger.
        """
        return self.loop.run_until_interrupted(self._take(count), "taking groups")

    def stream(self, count: int, train: Callable[[list[Any]], bool], least: int) -> list[Any]:
        """Take groups like `take`; give those that are certain to be among them to `train` while others are sampled.

        A part has at least `least` sampled tokens. No part follows one for which `train` returns False.
        """
        try:
            while part := self.loop.run_until_interrupted(self._certain_part(count, least), "waiting for groups"):
                self.given |= {group[0].group for group in part}
                least = least if train(part) else sys.maxsize
            return self.loop.run_until_interrupted(self._end_stream(), "taking groups")
        finally:
            self.loop.run(self._stop_taking(), "ending a stream of groups")

    async def _certain_part(self, count: int, least: int) -> list[Any]:
        """Wait for groups that will be trained and were not given away; return none once the step is complete."""
        if self.taking is None:
            self.taking = asyncio.create_task(self._take(count))
        while not self.taking.done():
            self.has_more.clear()
            part = [group for group in self._certain(count) if group[0].group not in self.given]
            if part and sum(one.sampled_tokens() for group in part for one in group) >= least:
                return part
            more = asyncio.create_task(self.has_more.wait())
            await asyncio.wait({self.taking, more}, return_when=asyncio.FIRST_COMPLETED)
            more.cancel()
        return []

    async def _end_stream(self) -> list[Any]:
        assert self.taking is not None
        groups = await self.taking
        assert self.given <= {group[0].group for group in groups}, "a group was trained that the step does not have"
        self.given.clear()
        return groups

    async def _stop_taking(self) -> None:
        if self.taking is not None:
            self.taking.cancel()
            await asyncio.wait({self.taking})
        self.taking = None

    def _certain(self, count: int) -> list[Any]:
        """Return the step's groups that are sampled and will be trained, whatever becomes of those before them."""
        found, places = list(self.ready), count - len(self.ready)
        left = count * self.plan.dynamic.max_batches - self.examined if self.plan.dynamic.enabled else places
        for one in list(self.running.values())[:left]:
            group = one.task.result() if one.task.done() and one.task.exception() is None else None
            if group is not None and self._fate(group):
                continue
            found += [scored_part(group)] if group is not None and places else []
            places -= places > 0
        return found

    async def _renew(self) -> None:
        """Drop groups that are too old now, and fill the queue."""
        self.sampler.begin_step()
        late = [one for one in self.running.values() if one.last_version < self.version]
        ended = [one for one in late if one.task.done() and one.task.exception() is None]
        self.dropped.lengths += [length for one in ended for length in sampled_lengths(one.task.result())]
        rest = [one.number for one in late if one not in ended]
        partial = await self.sampler.partial_lengths(rest) if rest else []
        self.dropped.lengths += partial
        for at, one in enumerate(one for one in late if one.number in rest):
            self.bias.end(one.last_version, [] if at else partial)
        self._end(late)
        self.ledger.close([one.number for one in late], "too_old")
        self.dropped.too_old = len(late)
        await self._admit(self.plan.capacity() - len(self.running))

    def _end(self, groups: Collection[InFlightGroup]) -> None:
        for one in groups:
            self._remove(one)
            one.task.cancel()
        self.finished = {last: [one for one in some if one in self.running] for last, some in self.finished.items()}

    def _remove(self, one: InFlightGroup) -> None:
        del self.running[one.number]
        self.expiring[one.last_version] -= 1
        if not self.expiring[one.last_version]:
            del self.expiring[one.last_version]

    def _note_finished(self, one: InFlightGroup, task: asyncio.Task[list[Any]]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.bias.end(one.last_version, sampled_lengths(task.result()))
        if self.running.get(one.number) is one:  # and was not ended
            heappush(self.finished.setdefault(one.last_version, []), one.number)
            self.has_finished.set()
            self.has_more.set()

    def _draw_awake(self) -> int:
        """Draw the next row that does not rest. Where nearly all do, the rest that would end first ends early."""
        pools, most = self.ledger.pools, min(len(self.prompts), MOST_SKIPPED) if self.plan.difficulty.enabled else 0
        for _ in range(most):
            number = self.ledger.draw(row := next(self.order))
            if not (fate := pools.skip(row)):
                return number
            self.ledger.close([number], fate)
            self.dropped.skipped[fate] += 1
        if (row := next(self.order)) in pools.left and most:
            self.dropped.woken += 1
            pools.wake(row := pools.next_awake())
        return self.ledger.draw(row)

    def judge(self, groups: Sequence[Sequence[Episode]]) -> None:
        """Put the rows of groups that are about to get their fate into the pools of their difficulty."""
        config = self.plan.difficulty
        for group in groups if config.enabled else ():
            rewards = [part_reward(one, None) for one in group if one.outcome.is_scored]
            rate = fmean(reward >= config.pass_reward for reward in rewards)
            self.ledger.pools.judge(self.ledger.under_way[group[0].group], rate, config)

    def draw(self) -> tuple[int, Prompt]:
        """Draw the next prompt that fits; those that do not, of a large dataset, get their fate."""
        for _ in range(MOST_TOO_LONG):
            number = self.again.pop(0) if self.again else self._draw_awake()
            try:
                return number, self.prompts[self.ledger.under_way[number]]
            except PromptTooLong:
                self.ledger.close([number], "too_long")
                self.dropped.too_long += 1
            except ConfigError as error:  # it keeps its place for a resumed run, whose keys may differ
                raise UnusableData(str(error)) from error
        raise NothingToLearn(
            f"{MOST_TOO_LONG} prompts in a row have more than rollout.max_prompt_tokens tokens: raise the limit"
        )

    async def _admit(self, count: int) -> None:
        for _ in range(count):
            passed = self._left_before(self.again[0]) if self.again else 0
            try:
                number, prompt = self.draw()
            except UnusableData as error:
                self.unusable = error
                return
            task = asyncio.create_task(self.sampler.sample((number, prompt), number))
            one = self.running[number] = InFlightGroup(number, self.version + self.plan.max_staleness, task, passed)
            self.expiring[one.last_version] += 1
            self.bias.begin(one.last_version)
            task.add_done_callback(partial(self._note_finished, one))

    async def _take(self, count: int) -> list[Any]:
        most, ready = count * self.plan.dynamic.max_batches, self.ready
        while len(ready) < count and (self.examined < most or not self.plan.dynamic.enabled):
            if self.unusable is not None:
                raise self.unusable
            one = await self._next(count - len(ready))
            self.examined += 1
            if self._is_trainable(one):
                ready.append(scored_part(one.task.result()))
            else:
                await self._admit(self._replacements(count - len(ready), most - self.examined))
        self.ready, self.examined = [], 0
        self.dropped.length_bias = self.bias.settle(self.version + self.plan.max_staleness)
        if self.plan.max_staleness == 0:  # groups sampled ahead and not needed come first in the next step
            self.again, self.bias = sorted([*self.again, *self.running]), LengthBias()
            self._end([*self.running.values()])
        if not ready:
            raise NothingToLearn(
                f"none of {count * self.plan.dynamic.max_batches} groups has completions with different rewards: "
                "choose prompts of another difficulty, or set algorithm.dynamic_sampling.enabled=false"
            )
        return sorted(ready, key=lambda group: group[0].group)

    def _replacements(self, wanted: int, left: int) -> int:
        """Return how many groups to sample in place of one that is not trained.

        Dynamic sampling of a synchronous run samples at once as many as it needs at the present share of useful ones.
        """
        if not self.plan.dynamic.enabled:
            return 1
        if self.plan.max_staleness:
            return int(left > len(self.running))
        fates = self.ledger.fates
        useful = fates.get("trained", 0) + len(self.ready)
        total = useful + sum(fates.get(fate, 0) for fate in EXAMINED[1:])
        likely = math.ceil(wanted * total / max(useful, 1))
        return max(min(likely, left) - len(self.running), 0)

    async def _next(self, wanted: int) -> InFlightGroup:
        """Wait for a group; the timeout applies to one group, not to a whole step."""
        pool, seconds = self.sampler.pool, self.loop.timeout_seconds
        loss = asyncio.create_task(pool.engine_lost.wait())
        try:
            async with asyncio.timeout(seconds):
                while not pool.lost:
                    self.has_finished.clear()
                    if one := self._take_finished(wanted):
                        return one
                    found = asyncio.create_task(self.has_finished.wait())
                    await asyncio.wait({found, loss}, return_when=asyncio.FIRST_COMPLETED)
                    found.cancel()
            raise EngineLost("; ".join(pool.lost.values()))
        except TimeoutError:
            self._end([*self.running.values()])
            raise RolloutFailure(
                f"sampling {self.sampler.size} completions of a prompt: not done within timeout_seconds={seconds:.0f}"
            ) from None
        finally:
            loss.cancel()

    def _take_finished(self, wanted: int) -> InFlightGroup | None:
        """Take the first group that is sampled and may fill one of `wanted` places now.

        A synchronous run takes them in the order of the data, to be reproducible.
        """
        if self.plan.max_staleness == 0:
            one = next(iter(self.running.values()), None)
            if one is None or not one.task.done():
                return None
        else:
            ready = [self.finished[last] for last in self._eligible(wanted) if self.finished.get(last)]
            if not ready or (self._must_wait_for(oldest := next(iter(self.running))) and min(ready)[0] != oldest):
                return None
            one = self.running[heappop(min(ready))]
        self._remove(one)
        for other in self.running.values():
            other.passed += other.number < one.number
        return one

    def _must_wait_for(self, number: int) -> bool:
        """Tell whether a group was passed by as many as may be; no other was passed more often than the oldest."""
        return self.plan.window is not None and self.running[number].passed >= self.plan.window - 1

    def _left_before(self, number: int) -> int:
        """Return how many later groups left the line before one that a resumed run samples again, at most."""
        return self.ledger.drawn - 1 - number - sum(one > number for one in self.ledger.under_way)

    def _eligible(self, wanted: int) -> list[int]:
        """Return the last versions of groups that may fill one of `wanted` places without another group expiring."""
        found, sooner, urgent = [], 0, 0
        for last in sorted(self.expiring):
            if urgent < wanted or self.plan.drop_old:
                found.append(last)
            sooner += self.expiring[last]
            # Later steps have places for so many groups that expire at `last` or before; the others need places now.
            urgent = max(urgent, sooner - (last - self.version) * self.plan.prompts_per_step)
        return found

    def _is_trainable(self, one: InFlightGroup) -> bool:
        """Count failures, and tell whether enough rewards are left and, under dynamic sampling, different ones."""
        group = one.task.result()
        failed = self.budget.add(group)
        self.dropped.completions += failed
        left_out = [trajectory for trajectory in group if trajectory.outcome is Outcome.LEFT_OUT]
        self.dropped.left_out += len(left_out)
        self.dropped.metrics += [trajectory.metrics for trajectory in left_out]
        self.dropped.lengths += (lengths := sampled_lengths(group))
        self.bias.take(self.version + self.plan.max_staleness, lengths)
        fate = self._fate(group)
        self.dropped.groups += fate in ("failed", "left_out")
        self.dropped.uniform += [self._rewards(group)[0]] if fate == "uniform" else []
        self.left_out = self.left_out + 1 if fate == "left_out" else 0
        if self.left_out > self.plan.prompts_per_step * self.plan.dynamic.max_batches:
            raise NothingToLearn(
                f"limits ended the episodes of {self.left_out} groups in a row ({left_out[-1].cut_off}), and "
                "environment.truncated=drop drops them: raise the limit, or set environment.truncated=judge"
            )
        self.failed = self.failed + 1 if fate == "failed" else 0
        if self.failed > SMALLEST_WINDOW:
            reason = f"{self.failed} groups in a row have too few rewards to train on"
            raise RolloutFailure(f"{reason}. {self.budget.explain()}")
        if fate:
            self.judge([group] * (fate == "uniform"))
            self.ledger.close([one.number], fate)
        return not fate

    def _fate(self, group: Sequence[Episode]) -> str:
        """Return why a group is not trained, or nothing."""
        if sum(one.outcome.is_scored for one in group) < min(2, self.sampler.size):
            return "failed" if any(one.outcome.is_failure for one in group) else "left_out"
        uniform = self.plan.dynamic.enabled and largest_gap(group, self.plan.dynamic.reward) <= SAME_REWARD
        return "uniform" if uniform else ""

    def _rewards(self, group: Sequence[Episode]) -> list[float]:
        """Return the rewards that dynamic sampling compares."""
        return [part_reward(one, self.plan.dynamic.reward) for one in group if one.outcome.is_scored]


def sampled_lengths(group: Sequence[Episode]) -> list[int]:
    """Return the lengths of a group's completions, trained or not."""
    return [one.sampled_tokens() for one in group if not one.outcome.is_failure]


def scored_part(group: list[Any]) -> list[Any]:
    """Return the episodes with a reward."""
    return group.with_rewards() if isinstance(group, SampledGroup) else [one for one in group if one.outcome.is_scored]


def largest_gap(group: Sequence[Episode], part: str | None = None) -> float:
    """Return the largest difference of rewards between episodes of a group, in any role."""
    earned = [(part_reward(one, part), *one.role_rewards.values()) for one in group if one.outcome.is_scored]
    return max(max(same) - min(same) for same in zip(*earned, strict=True))


def part_reward(episode: Episode, part: str | None) -> float:
    """Return the reward of one part; the whole one if none is named, or a policy error left that part without one."""
    assert episode.reward is not None
    return episode.metrics.get(f"reward/{part}", episode.reward) if part else episode.reward
