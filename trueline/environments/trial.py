"""One episode with a made-up reply before models load: what would fail at once is refused."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from trueline.config.base import ConfigError
from trueline.data.messages import Message, Talk, Tool
from trueline.data.types import Completion, Prompt
from trueline.environments.base import OutOfBudget, Reply, Structure, as_said
from trueline.environments.endpoint import PolicyEndpoint, Structures
from trueline.environments.multi_turn import AgentEnvironment, StepEnvironment, check_earned
from trueline.environments.tools.calls import SPELLINGS
from trueline.environments.tools.formats import UNKNOWN, Parser
from trueline.rewards.combined import CombinedReward
from trueline.usercode.failures import PolicyError, UserCodeFailure, WrongResult
from trueline.usercode.host import EpisodeHosts

SECONDS, CLOSE_SECONDS = 10.0, 2.0
MADE_UP = "I do not know."
LAST_LINES = 400  # characters of a log


class MadeUpPolicy:
    """Replies once, and not where a format is required."""

    def __init__(self) -> None:
        self.asked = False

    async def reply(
        self,
        messages: list[Message],
        tools: Sequence[Tool] = (),
        worded: Callable[[str], Message] = as_said,
        stop: Sequence[str] = (),
    ) -> Reply:
        return (await self.replies(1, messages, tools, worded, stop))[0]

    async def replies(
        self,
        count: int,
        messages: list[Message],
        tools: Sequence[Tool] = (),
        worded: Callable[[str], Message] = as_said,
        stop: Sequence[str] = (),
        structure: Structure | None = None,
        template_arguments: dict[str, Any] | None = None,
    ) -> list[Reply]:
        before, self.asked = self.asked, True
        if before or structure is not None:
            raise OutOfBudget("a trial has one reply, in no format")
        return [Reply(MADE_UP, worded(MADE_UP), Completion.of([0], [0.0], 0, "stop"), 1)] * count

    def add_reward(self, reward: float) -> None: ...

    def hear(self, messages: list[Message]) -> None: ...

    def talk(self) -> Talk:
        return Talk()


async def try_episode(hosts: EpisodeHosts, prompt: Prompt, *, rewarded: bool) -> list[str]:
    """Refuse an environment that fails before its first reply or returns what none may; return other failures."""
    name, policy = hosts.code.name(), MadeUpPolicy()
    seconds = min(SECONDS, hosts.code.timeout_seconds)
    async with open_environment(hosts) as environment:
        try:
            async with asyncio.timeout(seconds):
                place = await environment.place()
                earned = await environment.take_turns(place, policy, prompt)
            check_earned(earned, place, rewarded or not policy.asked)
        except (TimeoutError, OutOfBudget, PolicyError):  # it needs longer, continues, or blames the reply
            return []
        except WrongResult as failure:
            raise ConfigError(str(failure)) from None
        except UserCodeFailure as failure:
            if not policy.asked:
                raise ConfigError(f"{name}: {failure.reason}{last_lines(hosts)}") from None
            why = failure.reason.strip().rpartition("\n")[2]
            return [f"{name} failed on the made-up reply {MADE_UP!r}: {why}; such episodes have no reward"]
    if not policy.asked:
        raise ConfigError(f"{name}: a trial episode ended before it asked the model for a reply{last_lines(hosts)}")
    return []


@asynccontextmanager
async def open_environment(hosts: EpisodeHosts) -> AsyncIterator[StepEnvironment | AgentEnvironment]:
    """Open the environment of one episode as a run does, and give its place back."""
    rewards, endpoint = CombinedReward({}, 0.0), None
    environment: StepEnvironment | AgentEnvironment = StepEnvironment(hosts, rewards)
    if hosts.hosts[0].about["plays"] == "itself":
        every = Structures(SPELLINGS["json"], lambda structure: "")  # which of them an engine can follow is the run's
        endpoint = PolicyEndpoint(model="policy", decode=str, structures=every)
        await endpoint.start()
        environment = AgentEnvironment(hosts, rewards, endpoint, Parser(UNKNOWN))
    try:
        yield environment
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await environment.close()
        if endpoint is not None:
            await endpoint.stop()


def last_lines(hosts: EpisodeHosts) -> str:
    """Return what the user's code printed last; the log of a trial is removed."""
    said = hosts.log.read_text(errors="replace").strip()[-LAST_LINES:]
    return f"; it printed: {said}" if said else ""
