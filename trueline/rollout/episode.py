"""One episode: the policy and an environment take turns until it is done."""

import traceback
from collections.abc import Awaitable

from trueline.data.chat import ChatFormat
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.environments.base import Ending, Environment, EnvironmentFailure, EnvironmentLost, OutOfBudget
from trueline.monitoring.beats import WORK
from trueline.rewards.base import RewardFailure, RewardTimeout, RewardUnreachable
from trueline.rollout.engine import SamplingParams
from trueline.rollout.pool import EnginePool
from trueline.rollout.session import Budget, Session, Ticket
from trueline.runtime.actors import ActorFailure

BEGINNINGS = 3  # of an episode that others' faults end


class Episodes:
    def __init__(self, pool: EnginePool, chat: ChatFormat, budget: Budget) -> None:
        self.pool, self.chat, self.budget = pool, chat, budget

    async def run(self, environment: Environment, prompt: Prompt, ticket: Ticket, params: SamplingParams) -> Trajectory:
        losses = 0
        try:
            with self.pool.kept(ticket.group), WORK.doing("environment", type(environment).__name__, "play"):
                while True:
                    session = Session(self.pool, self.chat, prompt, ticket, params, self.budget)
                    if await self._play(environment, session, last=losses == BEGINNINGS - 1):
                        return session.trajectory
                    losses += 1
        finally:
            await environment.close()

    async def _play(self, environment: Environment, session: Session, *, last: bool) -> bool:
        """Play an episode to its end, and tell whether it counts; else it is to begin anew, unless it is the last."""
        trajectory = session.trajectory
        try:
            ending = await attempt(environment.play(session, trajectory.prompt), session)
        except EnvironmentLost as lost:
            fail(trajectory, lost)
            return last
        finally:
            if self.budget.turns > 1:
                session.tell()
        if ending is not None:
            self._end(session, ending, type(environment).__name__)
        return True

    def _end(self, session: Session, ending: Ending, name: str) -> None:
        trajectory = session.trajectory
        if session.last is None:
            why = f": {trajectory.cut_off}" if trajectory.cut_off else ""
            fail(trajectory, EnvironmentFailure(f"{name} ended before the policy said a word{why}"))
            return
        session.add_reward(ending.reward)
        record(trajectory, ending)
        trajectory.dialogues = session.dialogues()
        if self.budget.turns > 1:
            counts = {"turns": session.turns, "sequences": len(trajectory.sequences())}
            trajectory.metrics |= {f"episode/{name}": float(count) for name, count in counts.items()}


async def attempt(play: Awaitable[Ending], session: Session) -> Ending | None:
    """Return how the environment ended, or None, with its failure in the trajectory; an engine's failure is raised."""
    try:
        return await play
    except OutOfBudget:
        return Ending()  # with what its turns have earned
    except EnvironmentLost:
        raise
    except Exception as error:
        if error in session.engine_failures:
            raise
        fail(session.trajectory, error)
        return None


def fail(trajectory: Trajectory, error: Exception) -> None:
    trajectory.outcome, trajectory.reward = failure_of(error), None
    told = isinstance(error, RewardFailure | ActorFailure | EnvironmentFailure)  # in words that need no traceback
    trajectory.error = str(error) if told else "".join(traceback.format_exception(error))


def record(trajectory: Trajectory, ending: Ending) -> None:
    trajectory.metrics |= ending.metrics
    trajectory.error = ending.policy_error
    if ending.left_out:
        trajectory.outcome, trajectory.reward = Outcome.LEFT_OUT, None
    elif ending.policy_error:
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
