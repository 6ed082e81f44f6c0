"""The environment of one prompt, one completion and one reward."""

from typing import Any

from trueline.data.messages import Talk, content_of
from trueline.data.pictures import data_url
from trueline.data.types import Prompt
from trueline.environments.base import Environment, EpisodeResult, Policy, as_said
from trueline.rewards.base import IMAGES, Call
from trueline.rewards.combined import CombinedReward
from trueline.rewards.scoring import CONVERSATIONAL


class SingleTurn(Environment):
    def __init__(self, rewards: CombinedReward) -> None:
        self.rewards = rewards

    async def play(self, policy: Policy, prompt: Prompt) -> EpisodeResult:
        return await score_reply(self.rewards, prompt, (await policy.reply(prompt.messages, prompt.tools)).text)


async def score_reply(
    rewards: CombinedReward, prompt: Prompt, reply: str, talk: Talk | None = None, earned: float = 0.0
) -> EpisodeResult:
    """Return the result of an episode: the reward of its reply, added to what it has earned already."""
    result = await rewards.score(reward_call(prompt, reply, talk))
    parts = {f"reward/{name}": value for name, value in result.parts.items()}
    return EpisodeResult(result.reward + earned, result.policy_error, parts | result.metrics)


def reward_call(prompt: Prompt, reply: str, talk: Talk | None = None) -> Call:
    """Return the values for a reward function by name; without a talk, the reply follows the prompt."""
    talk = talk or Talk(prompt.messages, [as_said(reply)])
    return {
        **prompt.columns,
        **({"tools": prompt.tools} if "tools" in prompt.columns else {}),
        "reply": reply,
        "prompt": content_of(prompt.messages[-1]),
        "messages": talk.before_reply(),
        "turns": talk.after_opening(),
        "label": prompt.label,
        **({IMAGES: [data_url(picture) for picture in prompt.pictures]} if prompt.pictures else {}),
        **({CONVERSATIONAL: True} if any(map(is_conversation, prompt.columns.values())) else {}),
    }


def is_conversation(value: Any) -> bool:
    """Return whether a column holds messages; TRL's reward functions then get messages."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]
