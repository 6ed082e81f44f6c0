"""The environment of one prompt, one completion and one reward."""

from typing import Any

from trueline.data.messages import Talk, content_of
from trueline.data.types import Prompt
from trueline.environments.base import Ending, Environment, Policy, as_said
from trueline.rewards.base import Call
from trueline.rewards.combined import CombinedReward
from trueline.rewards.process import CONVERSATIONAL


class SingleTurn(Environment):
    def __init__(self, rewards: CombinedReward) -> None:
        self.rewards = rewards

    async def play(self, policy: Policy, prompt: Prompt) -> Ending:
        reply = await policy.reply(prompt.messages, prompt.tools)
        return await judged(self.rewards, prompt, reply.text)


async def judged(
    rewards: CombinedReward, prompt: Prompt, reply: str, talk: Talk | None = None, earned: float = 0.0
) -> Ending:
    """Return the ending that the rewards of a run give a reply, beside what the episode has earned already."""
    verdict = await rewards.verdict(reward_call(prompt, reply, talk))
    parts = {f"reward/{name}": value for name, value in verdict.parts.items()}
    return Ending(verdict.reward + earned, verdict.policy_error, parts)


def reward_call(prompt: Prompt, reply: str, talk: Talk | None = None) -> Call:
    """Return what a reward function may ask of a completion, by name; without a talk it answers the prompt itself."""
    talk = talk or Talk(prompt.messages, [as_said(reply)])
    return {
        **prompt.columns,
        **({"tools": prompt.tools} if "tools" in prompt.columns else {}),
        "reply": reply,
        "prompt": content_of(prompt.messages[-1]),
        "messages": talk.before_reply(),
        "turns": talk.after_opening(),
        "label": prompt.label,
        **({CONVERSATIONAL: True} if any(map(is_conversation, prompt.columns.values())) else {}),
    }


def is_conversation(value: Any) -> bool:
    """Tell whether a column holds messages, which is what TRL's reward functions are then given."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]
