"""One question, one answer, one reward."""

from trueline.data.types import Message, Prompt
from trueline.environments.base import Environment, Step
from trueline.rewards.base import Reward


class SingleTurn(Environment):
    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self.prompt: Prompt

    async def reset(self, prompt: Prompt) -> list[Message]:
        self.prompt = prompt
        return prompt.messages

    async def step(self, reply: str) -> Step:
        prompt = self.prompt
        call = {
            **prompt.columns,
            "reply": reply,
            "prompt": prompt.messages[-1]["content"],
            "messages": prompt.messages,
            "label": prompt.label,
        }
        return Step(await self.reward.score(call), done=True)
