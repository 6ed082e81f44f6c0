"""How good the policy is on prompts it does not train on."""

import asyncio
from collections.abc import Callable
from statistics import fmean

from trueline.data.types import Prompt, Trajectory
from trueline.environments.base import Environment
from trueline.rollout.engine import SamplingParams
from trueline.rollout.episode import Episodes, Ticket
from trueline.rollout.rollouts import EventLoop


class Evaluator:
    """One answer per held-out prompt. Failed rewards are counted apart, never as zeros."""

    def __init__(
        self,
        episodes: Episodes,
        environment: Callable[[], Environment],
        prompts: list[Prompt],
        params: SamplingParams,
        loop: EventLoop,
    ) -> None:
        self.episodes, self.environment, self.prompts = episodes, environment, prompts
        self.params, self.loop = params, loop

    def run(self, seed: int) -> tuple[dict[str, float], list[Trajectory]]:
        trajectories = self.loop.run(self._sample(seed), f"evaluating {len(self.prompts)} prompts")
        scored = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
        lengths = [sum(trajectory.mask) for trajectory in trajectories]
        metrics = {
            "evaluation/answer_tokens": fmean(lengths),
            "evaluation/failed_share": 1 - len(scored) / len(trajectories),
        }
        return metrics | ({"evaluation/reward": fmean(scored)} if scored else {}), trajectories

    async def _sample(self, seed: int) -> list[Trajectory]:
        runs = [
            self.episodes.run(self.environment(), prompt, Ticket(number, 0, seed + number, "evaluate"), self.params)
            for number, prompt in enumerate(self.prompts)
        ]
        return list(await asyncio.gather(*runs))
