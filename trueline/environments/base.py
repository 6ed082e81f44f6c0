"""The interface of an environment, which is what the policy talks to."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trueline.data.messages import Message, Talk, Tool
from trueline.data.types import Completion, Prompt


class OutOfBudget(Exception):
    """The episode has had all its turns, or has no room for another token: it ends here, and is truncated."""

    def __init__(self, reason: str, limit: str = "") -> None:
        super().__init__(reason)
        self.limit = limit  # the key that sets it


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the policy."""

    text: str
    message: Message  # for the next turns of the conversation
    completion: Completion  # exactly as it was sampled
    prompt_tokens: int  # all tokens before it


@dataclass(frozen=True, slots=True)
class Structure:
    """What a reply is held to while it is sampled: JSON of a schema, between two texts."""

    schema: str  # as JSON
    begin: str = ""
    end: str = ""


# Makes the message by which others know a reply from its text with special tokens, say with its calls taken apart.
Wording = Callable[[str], Message]


def as_said(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Policy(Protocol):
    """The policy in one episode. All that it samples is recorded and trained on."""

    async def reply(
        self, messages: list[Message], tools: Sequence[Tool] = (), worded: Wording = as_said, stop: Sequence[str] = ()
    ) -> Reply:
        """Return the next turn of a conversation, up to one of the texts in `stop`, or raise OutOfBudget.

        Where it goes on from one that this policy has seen, only what is new becomes tokens.
        """
        return (await self.replies(1, messages, tools, worded, stop))[0]

    async def replies(
        self,
        count: int,
        messages: list[Message],
        tools: Sequence[Tool] = (),
        worded: Wording = as_said,
        stop: Sequence[str] = (),
        structure: Structure | None = None,
        template_arguments: dict[str, Any] | None = None,
    ) -> list[Reply]:
        """Return several next turns of one conversation, or raise OutOfBudget before any of them is sampled.

        `template_arguments` are given to the chat template beside those of the run.
        """

    def take_role(self, role: str) -> None:
        """Speak in this role from now on: each has its own sequences, and its own reward."""

    def add_reward(self, reward: float, role: str = "") -> None:
        """Add to the reward of the last turn, or of this role's last turn."""

    def hear(self, messages: list[Message]) -> None:
        """Record messages after the last reply."""

    def talk(self) -> Talk:
        """Return the conversation of the last reply; before the first one, nothing."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """How an episode ended."""

    reward: float = 0.0  # in addition to those of single turns
    policy_error: str = ""  # what the policy did wrong; the episode keeps its reward
    metrics: dict[str, float] = field(default_factory=dict)
    left_out: bool = False  # it has no reward, and is not trained on
    role_rewards: dict[str, float] = field(default_factory=dict)  # in place of `reward`, where there are several roles


class Environment(ABC):
    """What the policy talks to; every episode has an instance of its own."""

    @abstractmethod
    async def play(self, policy: Policy, prompt: Prompt) -> EpisodeResult:
        """Take turns with the policy until the episode is done."""

    async def close(self) -> None:  # noqa: B027  (optional)
        """Give back what the episode held."""
