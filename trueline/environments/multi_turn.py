"""Environments of several turns: a user's class, tools, and agents."""

import asyncio
import itertools
from abc import abstractmethod
from collections.abc import Callable
from statistics import fmean
from typing import Any

from trueline.config.base import ConfigError
from trueline.data.messages import Message
from trueline.data.types import Prompt
from trueline.environments.base import Environment, EpisodeResult, OutOfBudget, Policy, Reply
from trueline.environments.endpoint import PolicyEndpoint
from trueline.environments.hosted import AgentCode, StepCode
from trueline.environments.single_turn import reward_call, score_reply
from trueline.environments.tools.calls import Parsed, ToolCall, as_message
from trueline.environments.tools.contents import Part
from trueline.environments.tools.formats import Parse
from trueline.environments.tools.toolbox import Toolbox
from trueline.rewards.combined import CombinedReward
from trueline.usercode.failures import PolicyError, ToolRaised, UserCodeFailure, WrongResult
from trueline.usercode.host import EpisodeHosts, EpisodePlace

OWN_METRICS = "environment/"  # prefix of user metrics, so that none has the name of one of the run


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return the values of a prompt for user code, by name."""
    return {name: value for name, value in reward_call(prompt, "").items() if name not in ("reply", "turns")}


class HostedEnvironment(Environment):
    """Has a place in a process of user code for its episode; the run's rewards score the end."""

    drop_truncated = False  # episodes that run out of turns or tokens
    sees = False  # the model reads pictures

    def __init__(self, hosts: EpisodeHosts, rewards: CombinedReward) -> None:
        self.hosts, self.rewards = hosts, rewards
        self.here: EpisodePlace | None = None
        self.metrics: dict[str, float] = {}
        self.role_rewards: dict[str, float] = {}  # at the end, of an environment with roles

    async def play(self, policy: Policy, prompt: Prompt) -> EpisodeResult:
        self.metrics, self.role_rewards = {}, {}
        try:
            place = await self.place()
            earned = check_earned(await self.take_turns(place, policy, prompt), place, bool(self.rewards.parts))
        except OutOfBudget:
            if not policy.talk().turns:
                raise
            if self.drop_truncated:
                return EpisodeResult(metrics=self.metrics, left_out=True)
            earned = 0.0
        except ConfigError as error:  # of messages that the model cannot be shown
            raise WrongResult(str(error), self.hosts.code.name()) from error
        if not self.rewards.parts:
            return EpisodeResult(earned, role_rewards=self.role_rewards, metrics=self.metrics)
        talk = policy.talk()
        result = await score_reply(self.rewards, prompt, talk.reply, talk, earned)
        return EpisodeResult(result.reward, result.policy_error, self.metrics | result.metrics)

    @abstractmethod
    async def take_turns(self, place: EpisodePlace, policy: Policy, prompt: Prompt) -> float | None:
        """Play to the end, and return its reward in addition to those of turns; None: a reward of the run scores it."""

    async def place(self) -> EpisodePlace:
        alone = self.here is not None and self.here.is_suspect
        await self.close()  # what an episode that starts again held
        self.here = await self.hosts.place(alone=alone)
        return self.here

    async def close(self) -> None:
        here, self.here = self.here, None
        if here is not None:
            await here.close()


def check_earned(earned: float | None, place: EpisodePlace, rewarded: bool) -> float:
    if earned is None and not rewarded:
        raise WrongResult("it returned no reward, and there is no --reward: add one of them", place.host.code.name())
    return earned or 0.0


class StepEnvironment(HostedEnvironment):
    """A user's class with `reset` and `step`; each of its roles has a conversation of its own with the policy."""

    async def take_turns(self, place: EpisodePlace, policy: Policy, prompt: Prompt) -> float:
        reports: dict[str, list[float]] = {}
        step = await place.call(StepCode.reset, values=row_of(prompt))
        talks: dict[str, list[Message]] = {}  # of each role
        self.role_rewards = dict.fromkeys(step["roles"], 0.0)
        while True:
            role = step["role"]
            talks[role] = [*talks.get(role, []), *step["messages"]]
            policy.take_role(role)
            reply = await policy.reply(talks[role], prompt.tools)
            talks[role] = [*talks[role], reply.message]
            step = await place.call(StepCode.step, reply=reply.text, role=role)
            for name, value in step["metrics"].items():  # the last of a name, and the mean of several in the episode
                values = reports.setdefault(f"{OWN_METRICS}{name}", [])
                values.append(value)
                self.metrics[f"{OWN_METRICS}{name}"] = value
                self.metrics |= {f"{OWN_METRICS}{name}/mean": fmean(values)} if len(values) > 1 else {}
            if step["done"]:
                policy.hear(step["messages"])
                self.role_rewards |= {role: step["reward"][role] for role in self.role_rewards}
                return float(step["reward"].get("", 0.0))
            for name, reward in step["reward"].items():
                policy.add_reward(reward, name)


class ToolEnvironment(HostedEnvironment):
    """The policy calls tools until it replies without a call; the run's rewards score that reply."""

    def __init__(self, hosts: EpisodeHosts, rewards: CombinedReward, parse: Parse) -> None:
        super().__init__(hosts, rewards)
        self.parse = parse

    async def take_turns(self, place: EpisodePlace, policy: Policy, prompt: Prompt) -> float:
        self.metrics |= dict.fromkeys(("tools/calls", "tools/mistakes", "tools/errors"), 0.0)
        messages, ids, parsed = prompt.messages, number_names("call"), Parsed("", [])

        def read_calls(text: str) -> Message:
            nonlocal parsed
            parsed = self.parse(text, prompt.tools)
            return as_message(parsed, ids)

        while True:
            reply = await policy.reply(messages, prompt.tools, read_calls)
            if not parsed.calls and not parsed.error:
                return 0.0
            messages = [*messages, reply.message, *await self._answers(place, parsed, reply)]

    async def _answers(self, place: EpisodePlace, parsed: Parsed, reply: Reply) -> list[Message]:
        if parsed.error:
            self.metrics["tools/mistakes"] += 1
            answers: list[tuple[str, str | list[Part]]] = [("error", f"error: {parsed.error}")]
        else:
            first, *others = (self._answer(place, call) for call in parsed.calls)
            texts = await asyncio.gather(first, *others) if others else [await first]
            answers = [(call.name, text) for call, text in zip(parsed.calls, texts, strict=True)]
        return [
            {"role": "tool", "tool_call_id": call["id"], "name": name, "content": text}
            for call, (name, text) in zip(reply.message["tool_calls"], answers, strict=True)
        ]

    async def _answer(self, place: EpisodePlace, call: ToolCall) -> str | list[Part]:
        self.metrics["tools/calls"] += 1
        try:
            found = await place.call(Toolbox.call, name=call.name, arguments=call.arguments, sees=self.sees)
            return found if isinstance(found, list) else str(found)
        except (PolicyError, ToolRaised) as error:
            self.metrics["tools/mistakes" if isinstance(error, PolicyError) else "tools/errors"] += 1
            return f"error: {error}"


def number_names(name: str) -> Callable[[], str]:
    """Return a function that makes unique names of nine letters and digits, which some templates require."""
    numbers = itertools.count(1)
    return lambda: f"{name}{next(numbers):0{9 - len(name)}d}"


class AgentEnvironment(HostedEnvironment):
    """A function or command that plays the episode itself, and reaches the policy through its endpoint."""

    def __init__(self, hosts: EpisodeHosts, rewards: CombinedReward, endpoint: PolicyEndpoint, parse: Parse) -> None:
        super().__init__(hosts, rewards)
        self.endpoint, self.parse = endpoint, parse

    async def take_turns(self, place: EpisodePlace, policy: Policy, prompt: Prompt) -> float | None:
        seat = self.endpoint.open(policy, self.parse)
        try:
            values, url = row_of(prompt), self.endpoint.url
            found = await place.call(AgentCode.play, seat.quiet, values=values, url=url, key=seat.key)
        except UserCodeFailure:
            if seat.failure is not None:
                raise seat.failure from None
            if seat.exhausted:
                raise OutOfBudget(seat.exhausted) from None
            raise
        finally:
            seat.close()
            self.metrics |= {f"agent/overridden/{name}": float(count) for name, count in seat.overridden.items()}
            self.metrics |= {"agent/structured": float(seat.structured)} if seat.structured else {}
        if seat.failure is not None:
            raise seat.failure
        played = found if isinstance(found, dict) else {"reward": found, "metrics": {}}
        self.metrics |= {f"{OWN_METRICS}{name}": value for name, value in played["metrics"].items()}
        reward: float | None = played["reward"]
        return reward
