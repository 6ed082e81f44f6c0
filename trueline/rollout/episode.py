"""One episode: the policy and an environment take turns until it is done."""

import traceback
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from trueline.data.chat import ChatFormat
from trueline.data.types import Completion, Outcome, Prompt, Trajectory
from trueline.environments.base import Environment, Step
from trueline.monitoring.beats import WORK
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
        trajectory = Trajectory(prompt, ticket.group)
        try:
            with WORK.doing("environment", type(environment).__name__, "reset"):
                messages = await attempt(environment.reset(prompt), trajectory)
            if messages is None:
                return trajectory
            tokens = self.chat.prompt_tokens(messages, prompt.tools)
            trajectory.add_observation(tokens)
            sampling = replace(params, seed=ticket.seed)
            completion = await self.pool.generate(tokens, sampling, ticket.group, ticket.request(0))
            completion, trajectory.reply = ended(completion, params.stop, self.chat.reply_text)
            trajectory.add_action(completion)
            trajectory.truncated = completion.finish_reason == "length"
            with WORK.doing("environment", type(environment).__name__, "step"):
                step = await attempt(environment.step(trajectory.reply), trajectory)
            if step is not None:
                record(trajectory, step)
        finally:
            await environment.close()
        return trajectory


def ended(completion: Completion, stops: Sequence[str], text_of: Callable[[list[int]], str]) -> tuple[Completion, str]:
    """Return the completion up to the token that completes a stop string, and its text before that string."""

    def text_up_to(length: int) -> str:
        return text_of(completion.tokens[:length].tolist())

    text = text_up_to(len(completion.tokens))
    if stop_place(text, stops) < 0:
        return completion, text
    lengths = range(len(completion.tokens))
    # Whole prefixes are decoded: a token may be a part of a character, and a stop string of several tokens.
    length = bisect_left(lengths, True, key=lambda length: stop_place(text_up_to(length), stops) >= 0)
    text = text_up_to(length)
    return completion.cut(length), text[: stop_place(text, stops)]


def stop_place(text: str, stops: Sequence[str]) -> int:
    """Return where the first stop string of a text begins, or -1."""
    return min((text.find(stop) for stop in stops if stop in text), default=-1)


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
