"""The interface of an environment, which is what the policy talks to."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from trueline.data.types import Message, Prompt


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers to a reply. Episodes have one turn: it must be `done`, without messages."""

    reward: float
    done: bool
    policy_error: str = ""  # what the reply did wrong; it keeps its reward
    messages: list[Message] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Environment(ABC):
    """What the policy talks to; every episode has an instance of its own."""

    @abstractmethod
    async def reset(self, prompt: Prompt) -> list[Message]:
        """Start the episode and return the conversation that the policy goes on with."""

    @abstractmethod
    async def step(self, reply: str) -> Step: ...

    async def close(self) -> None:  # noqa: B027  (optional)
        """Give back what the episode held."""
