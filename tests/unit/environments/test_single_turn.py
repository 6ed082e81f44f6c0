import asyncio
from typing import Any

from tests.support.tool_calls import TOOL_TALK, TOOLS
from trueline.config.reward import RewardPartConfig
from trueline.data.types import Completion, Prompt
from trueline.environments.base import Reply
from trueline.environments.single_turn import SingleTurn, reward_call
from trueline.rewards.combined import CombinedReward


class Recorder:
    """A reward that remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    async def score(self, call: dict[str, Any]) -> float:
        self.calls.append(call)
        return 0.75

    async def stop(self) -> None:
        pass


class Saying:
    """A policy that says one thing."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def reply(self, messages: list[dict[str, str]], tools: Any) -> Reply:
        self.asked = messages
        return Reply(self.text, {}, Completion.of([1], [0.0], 0, "stop"), 1)


def test_one_reply_is_scored_with_all_that_the_row_has() -> None:
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": "1+1="}]
    prompt = Prompt(3, messages, label="2", columns={"level": 5, "label": "overruled", "reply": "overruled"})
    reward = Recorder()
    environment = SingleTurn(CombinedReward({"reward": (reward, RewardPartConfig())}, policy_error=0.0))

    policy: Any = Saying("two")
    ending = asyncio.run(environment.play(policy, prompt))
    assert (policy.asked, ending.reward, ending.policy_error) == (messages, 0.75, "")
    said = {"reply": "two", "turns": [{"role": "assistant", "content": "two"}]}
    assert reward.calls == [{**said, "prompt": "1+1=", "messages": messages, "label": "2", "level": 5}]


def test_a_prompt_may_end_with_a_tool_or_without_text() -> None:
    columns = {"tools": "[...]"}
    call = reward_call(Prompt(0, TOOL_TALK[:3], columns=columns, tools=TOOLS), "two")
    assert (call["prompt"], call["messages"], call["tools"]) == ("2", TOOL_TALK[:3], TOOLS)  # tools as they were read
    assert reward_call(Prompt(0, TOOL_TALK[:2]), "")["prompt"] == ""
    assert reward_call(Prompt(0, [{"role": "tool", "content": None}]), "")["prompt"] == ""
