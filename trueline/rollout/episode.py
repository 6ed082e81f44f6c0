"""One episode: the policy and an environment take turns until it is done."""

import traceback

from trueline.data.chat import ChatFormat
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.environments.base import Environment, EpisodeResult, OutOfBudget
from trueline.monitoring.heartbeat import WORK
from trueline.rewards.base import RewardFailure, RewardTimeout, RewardUnreachable
from trueline.rollout.engine import SamplingParams
from trueline.rollout.pool import EnginePool, RolloutKey
from trueline.rollout.session import EpisodeLimits, Session
from trueline.runtime.actors import ActorFailure
from trueline.usercode.failures import ProcessLost, UserCodeFailure

MOST_ATTEMPTS = 3  # at an episode that failures of other episodes end
FAILURE_OUTCOMES = {  # the first that fits
    RewardTimeout: Outcome.REWARD_TIMEOUT,
    RewardUnreachable: Outcome.INFRA_ERROR,
    ActorFailure: Outcome.INFRA_ERROR,
    RewardFailure: Outcome.REWARD_ERROR,
}


class Episodes:
    def __init__(self, pool: EnginePool, chat: ChatFormat, limits: EpisodeLimits) -> None:
        self.pool, self.chat, self.limits = pool, chat, limits

    async def run(
        self, environment: Environment, prompt: Prompt, key: RolloutKey, params: SamplingParams
    ) -> Trajectory:
        losses = 0
        try:
            with self.pool.keep_group(key.group), WORK.doing("environment", type(environment).__name__, "play"):
                while True:
                    session = Session(self.pool, self.chat, Trajectory(prompt, key.group), key, params, self.limits)
                    if await self._play(environment, session, last=losses == MOST_ATTEMPTS - 1):
                        return session.trajectory
                    losses += 1
        finally:
            await environment.close()

    async def _play(self, environment: Environment, session: Session, *, last: bool) -> bool:
        """Play an episode, and return whether it counts; if not, it is played again. An engine's failure is raised."""
        trajectory = session.trajectory
        try:
            result = await environment.play(session, trajectory.prompt)
        except OutOfBudget:
            result = EpisodeResult()  # the rewards of its turns count
        except ProcessLost as lost:
            fail(trajectory, lost)
            return last
        except Exception as error:
            if error in session.engine_failures:
                raise
            fail(trajectory, error)
            return True
        finally:
            if self.limits.turns > 1:
                session.record_talk()
        self._end(session, result, type(environment).__name__)
        return True

    def _end(self, session: Session, result: EpisodeResult, name: str) -> None:
        trajectory = session.trajectory
        if session.last is None:
            why = f": {trajectory.cut_off}" if trajectory.cut_off else ""
            fail(trajectory, UserCodeFailure(f"{name} ended before the first completion{why}"))
            return
        trajectory.metrics |= result.metrics
        if result.role_rewards:
            session.end_roles(result.role_rewards)
        else:
            session.add_reward(result.reward)
        trajectory.error = result.policy_error
        if result.left_out:
            trajectory.outcome, trajectory.reward = Outcome.LEFT_OUT, None
        elif result.policy_error:
            trajectory.outcome = Outcome.POLICY_ERROR
        elif trajectory.truncated:
            trajectory.outcome = Outcome.TRUNCATED
        trajectory.dialogues = session.dialogues()
        if self.limits.turns > 1:
            counts = {"turns": session.turns, "sequences": len(trajectory.sequences())}
            trajectory.metrics |= {f"episode/{name}": float(count) for name, count in counts.items()}


def fail(trajectory: Trajectory, error: Exception) -> None:
    outcomes = (outcome for kind, outcome in FAILURE_OUTCOMES.items() if isinstance(error, kind))
    trajectory.outcome, trajectory.reward = next(outcomes, Outcome.ENVIRONMENT_ERROR), None
    trajectory.failed_reward = error.part if isinstance(error, RewardFailure) else ""
    is_ours = isinstance(error, RewardFailure | ActorFailure | UserCodeFailure)  # its message needs no traceback
    trajectory.error = str(error) if is_ours else "".join(traceback.format_exception(error))
