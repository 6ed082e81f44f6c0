"""Environments that a user wrote, tools, and agents: what a policy can play besides single turns."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from statistics import fmean
from typing import Any

from trueline.data.messages import Message
from trueline.data.types import Prompt
from trueline.environments.base import (
    Ending,
    Environment,
    EnvironmentFailure,
    OutOfBudget,
    Policy,
    Reply,
    WrongResult,
)
from trueline.environments.endpoint import Endpoint
from trueline.environments.hosts import Hosts, Mistake, Place, Raised
from trueline.environments.single_turn import judged, reward_call
from trueline.environments.tools.calls import Parsed, ToolCall, as_message
from trueline.environments.tools.formats import Parse
from trueline.rewards.combined import CombinedReward


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return what user code may ask of a prompt, by name."""
    row = reward_call(prompt, "")
    return {name: value for name, value in row.items() if name not in ("reply", "turns")}


class Hosted(Environment):
    """Has a place in a process of user code, as long as the episode lasts; a reward of the run judges its end."""

    def __init__(self, hosts: Hosts, rewards: CombinedReward) -> None:
        self.hosts, self.rewards = hosts, rewards
        self.here: Place | None = None
        self.metrics: dict[str, float] = {}

    async def play(self, policy: Policy, prompt: Prompt) -> Ending:
        self.metrics = {}
        try:
            place = await self.place()
            earned = check_earned(await self.take_turns(place, policy, prompt), place, bool(self.rewards.parts))
        except OutOfBudget:
            if not policy.talk().turns:
                raise
            if self.hosts.program.config.truncated == "drop":
                return Ending(metrics=self.metrics, left_out=True)
            earned = 0.0
        if not self.rewards.parts:
            return Ending(earned, metrics=self.metrics)
        talk = policy.talk()
        ending = await judged(self.rewards, prompt, talk.reply, talk, earned)
        return Ending(ending.reward, ending.policy_error, self.metrics | ending.metrics)

    @abstractmethod
    async def take_turns(self, place: Place, policy: Policy, prompt: Prompt) -> float | None:
        """Play to the end, and return what is earned by it besides what turns have earned; None: a reward judges it."""

    async def place(self) -> Place:
        alone = self.here is not None and self.here.suspect
        await self.close()  # what an episode that begins anew held
        self.here = await self.hosts.place(alone=alone)
        return self.here

    async def close(self) -> None:
        here, self.here = self.here, None
        if here is not None:
            await here.close()


def check_earned(earned: float | None, place: Place, rewarded: bool) -> float:
    if earned is None and not rewarded:
        raise WrongResult(f"{place.host.program.words()} returned no reward, and there is no --reward: add one of them")
    return earned or 0.0


OWN_METRICS = "environment/"  # in front of what user code reports, so that no name of it is one of the run's own


class Game(Hosted):
    """A user's class with `reset` and `step`."""

    async def take_turns(self, place: Place, policy: Policy, prompt: Prompt) -> float:
        self.reports: dict[str, list[float]] = {}
        messages = await place.ask("reset", values=row_of(prompt))
        while True:
            reply = await policy.reply(messages, prompt.tools)
            step = await place.ask("step", reply=reply.text)
            self._report(step["metrics"])
            if step["done"]:
                policy.hear(step["messages"])
                return float(step["reward"])
            messages = [*messages, reply.message, *step["messages"]]
            policy.add_reward(step["reward"])

    def _report(self, metrics: dict[str, float]) -> None:
        """Note what a step reports: the last value of a name, and the mean where there are several in the episode."""
        for name, value in metrics.items():
            values = self.reports.setdefault(name, [])
            values.append(value)
            self.metrics[f"{OWN_METRICS}{name}"] = value
            if len(values) > 1:
                self.metrics[f"{OWN_METRICS}{name}/mean"] = fmean(values)


class ToolUse(Hosted):
    """The policy calls tools until it answers without; the run's rewards judge that answer."""

    def __init__(self, hosts: Hosts, rewards: CombinedReward, parse: Parse) -> None:
        super().__init__(hosts, rewards)
        self.parse = parse

    async def take_turns(self, place: Place, policy: Policy, prompt: Prompt) -> float:
        self.metrics |= dict.fromkeys(("tools/calls", "tools/mistakes", "tools/errors"), 0.0)
        messages, ids, parsed = prompt.messages, numbered("call"), Parsed("", [])

        def worded(text: str) -> Message:
            nonlocal parsed
            parsed = self.parse(text, prompt.tools)
            return as_message(parsed, ids)

        while True:
            reply = await policy.reply(messages, prompt.tools, worded)
            if not parsed.calls and not parsed.error:
                return 0.0
            messages = [*messages, reply.message, *await self._answers(place, parsed, reply)]

    async def _answers(self, place: Place, parsed: Parsed, reply: Reply) -> list[Message]:
        named = reply.message["tool_calls"]
        if parsed.error:
            self.metrics["tools/mistakes"] += 1
            return [
                {"role": "tool", "tool_call_id": named[0]["id"], "name": "error", "content": f"error: {parsed.error}"}
            ]
        texts = await asyncio.gather(*(self._answer(place, call) for call in parsed.calls))
        return [
            {"role": "tool", "tool_call_id": made["id"], "name": call.name, "content": text}
            for made, call, text in zip(named, parsed.calls, texts, strict=True)
        ]

    async def _answer(self, place: Place, call: ToolCall) -> str:
        self.metrics["tools/calls"] += 1
        try:
            return str(await place.ask("call", name=call.name, arguments=call.arguments))
        except Mistake as mistake:
            self.metrics["tools/mistakes"] += 1
            return f"error: {mistake}"
        except Raised as raised:
            self.metrics["tools/errors"] += 1
            return f"error: {raised}"


def numbered(name: str) -> Callable[[], str]:
    """Return a function that makes names that differ, of nine letters and digits, as some templates want them."""
    count = 0

    def next_name() -> str:
        nonlocal count
        count += 1
        return f"{name}{count:0{9 - len(name)}d}"

    return next_name


class Agent(Hosted):
    """A function or program that plays the episode itself, and asks the policy through its endpoint."""

    def __init__(self, hosts: Hosts, rewards: CombinedReward, endpoint: Endpoint, parse: Parse) -> None:
        super().__init__(hosts, rewards)
        self.endpoint, self.parse = endpoint, parse

    async def take_turns(self, place: Place, policy: Policy, prompt: Prompt) -> float | None:
        seat = self.endpoint.open(policy, self.parse)
        try:
            values, url = row_of(prompt), self.endpoint.url
            reward: float | None = await place.ask("play", seat.quiet, values=values, url=url, key=seat.key)
        except EnvironmentFailure:
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
        return reward
