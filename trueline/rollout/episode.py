"""One episode: the policy and an environment take turns until it is done."""

import traceback
from dataclasses import dataclass, replace

from trueline.data.chat import ChatFormat
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.environments.base import Environment, Step
from trueline.rewards.base import RewardFailure, RewardTimeout, RewardUnreachable
from trueline.rollout.engine import SamplingParams
from trueline.rollout.pool import EnginePool
from trueline.runtime.actors import ActorFailure


@dataclass(frozen=True, slots=True)
class Ticket:
    """Which episode this is: the answer's group, its place there, and its own seed."""

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
        trajectory = Trajectory.start(prompt, ticket.group, self.chat.prompt_tokens(await environment.reset(prompt)))
        params = replace(params, seed=ticket.seed)
        completion = await self.pool.generate(trajectory.tokens, params, ticket.group, ticket.request(0))
        trajectory.add_action(completion)
        trajectory.reply = self.chat.reply_text(completion.tokens)
        trajectory.truncated = completion.finish_reason == "length"
        try:
            record(trajectory, await environment.step(trajectory.reply))
        except Exception as error:  # noqa: BLE001  (the boundary where user code runs)
            trajectory.outcome = failure_of(error)
            told = isinstance(error, RewardFailure | ActorFailure)  # in words that need no traceback
            trajectory.error = str(error) if told else traceback.format_exc()
        finally:
            await environment.close()
        return trajectory


def record(trajectory: Trajectory, step: Step) -> None:
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
