"""One episode: the policy and an environment take turns until it is done."""

from dataclasses import dataclass, replace

from trueline.data.chat import ChatFormat
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.environments.base import Environment, Step
from trueline.rewards.base import RewardFailure, RewardTimeout
from trueline.rollout.engine import SamplingParams
from trueline.rollout.pool import EnginePool


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
        if completion.finish_reason == "length":
            trajectory.outcome = Outcome.TRUNCATED
        try:
            record(trajectory, await environment.step(trajectory.reply))
        except RewardTimeout as error:
            trajectory.outcome, trajectory.error = Outcome.REWARD_TIMEOUT, str(error)
        except RewardFailure as error:
            trajectory.outcome, trajectory.error = Outcome.REWARD_ERROR, str(error)
        finally:
            await environment.close()
        return trajectory


def record(trajectory: Trajectory, step: Step) -> None:
    trajectory.reward = step.reward
    trajectory.metrics |= step.metrics
