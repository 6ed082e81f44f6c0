"""One episode: the policy and an environment take turns until it is done."""

import traceback
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import TypeVar

from trueline.data.chat import ChatFormat
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.environments.base import Environment, Step
from trueline.rewards.base import RewardFailure, RewardTimeout, RewardUnreachable
from trueline.rollout.engine import SamplingParams
from trueline.rollout.failures import RolloutFailure
from trueline.rollout.pool import EnginePool
from trueline.runtime.actors import ActorFailure

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Which episode this is: the completion's group, its place there, and its own seed."""

    group: int
    index: int
    seed: int | None
    purpose: str = "train"

    def request(self, turn: int) -> str:
        return f"{self.purpose}-{self.group}-{self.index}-{turn}"


class Episodes:
    def __init__(self, pool: EnginePool, chat: ChatFormat) -> None:
        self.pool, self.chat = pool, chat

    async def run(self, environment: Environment, prompt: Prompt, ticket: Ticket, params: SamplingParams) -> Trajectory:
        trajectory = Trajectory.start(prompt, ticket.group, [])
        try:
            messages = await attempt(environment.reset(prompt), trajectory)
            if messages is None:
                return trajectory
            trajectory.add_observation(self.chat.prompt_tokens(messages, prompt.tools))
            sampling = replace(params, seed=ticket.seed)
            completion = await self.pool.generate(trajectory.tokens, sampling, ticket.group, ticket.request(0))
            trajectory.add_action(completion)
            trajectory.reply = self.chat.reply_text(completion.tokens)
            trajectory.truncated = completion.finish_reason == "length"
            step = await attempt(environment.step(trajectory.reply), trajectory)
            if step is not None:
                record(trajectory, step)
        finally:
            await environment.close()
        return trajectory


async def attempt(call: Awaitable[Result], trajectory: Trajectory) -> Result | None:
    """Return what the environment returns, or None, with the failure in the trajectory."""
    try:
        return await call
    except Exception as error:  # noqa: BLE001  (the boundary where user code runs)
        trajectory.outcome = failure_of(error)
        told = isinstance(error, RewardFailure | ActorFailure)  # in words that need no traceback
        trajectory.error = str(error) if told else traceback.format_exc()
        return None


def record(trajectory: Trajectory, step: Step) -> None:
    if not step.done or step.messages:
        raise RolloutFailure(
            f"an environment answered done={step.done} with {len(step.messages)} messages: episodes have one turn, so "
            "it would not be heard; let its `step` return done=True and no messages"
        )
    trajectory.add_reward(step.reward)
    trajectory.metrics |= step.metrics
    trajectory.error = step.policy_error
    if step.policy_error:
        trajectory.outcome = Outcome.POLICY_ERROR
    elif trajectory.truncated:
        trajectory.outcome = Outcome.TRUNCATED


def failure_of(error: Exception) -> Outcome:
    kinds = {
        RewardTimeout: Outcome.REWARD_TIMEOUT,
        RewardUnreachable: Outcome.INFRA_ERROR,
        ActorFailure: Outcome.INFRA_ERROR,
        RewardFailure: Outcome.REWARD_ERROR,
    }
    return next((outcome for kind, outcome in kinds.items() if isinstance(error, kind)), Outcome.ENVIRONMENT_ERROR)
