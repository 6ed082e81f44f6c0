"""The environment of one prompt, one completion and one reward."""

from trueline.data.types import Message, Prompt, content_of
from trueline.environments.base import Environment, Step
from trueline.rewards.base import Call
from trueline.rewards.combined import CombinedReward


class SingleTurn(Environment):
    def __init__(self, rewards: CombinedReward) -> None:
        self.rewards = rewards
        self.prompt: Prompt

    async def reset(self, prompt: Prompt) -> list[Message]:
        self.prompt = prompt
        return prompt.messages

    async def step(self, reply: str) -> Step:
        verdict = await self.rewards.verdict(reward_call(self.prompt, reply))
        parts = {f"reward/{name}": value for name, value in verdict.parts.items()}
        return Step(verdict.reward, done=True, policy_error=verdict.policy_error, metrics=parts)


def reward_call(prompt: Prompt, reply: str) -> Call:
    """Return what a reward function may ask of a completion, by name."""
    return {
        **prompt.columns,
        **({"tools": prompt.tools} if "tools" in prompt.columns else {}),
        "reply": reply,
        "prompt": content_of(prompt.messages[-1]),
        "messages": prompt.messages,
        "label": prompt.label,
    }
