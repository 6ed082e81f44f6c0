"""Environments that a user wrote, tools, and agents: what a policy can play besides single turns."""

import asyncio
from collections.abc import Callable
from typing import Any

from trueline.data.messages import Message
from trueline.data.types import Prompt
from trueline.environments.base import Ending, Environment, EnvironmentFailure, OutOfBudget, Policy, Reply
from trueline.environments.chat_completions import Parse
from trueline.environments.endpoint import Endpoint
from trueline.environments.hosts import Hosts, Mistake, Place
from trueline.environments.single_turn import judged, reward_call
from trueline.environments.tools.calls import Parsed, ToolCall, as_message
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

    async def place(self) -> Place:
        alone = self.here is not None and self.here.suspect
        await self.close()  # what an episode that begins anew held
        self.here = await self.hosts.place(alone=alone)
        return self.here

    async def close(self) -> None:
        here, self.here = self.here, None
        if here is not None:
            await here.close()


class Game(Hosted):
    """A user's class with `reset` and `step`."""

    async def play(self, policy: Policy, prompt: Prompt) -> Ending:
        place = await self.place()
        messages = await place.ask("reset", values=row_of(prompt))
        metrics: dict[str, float] = {}
        while True:
            reply = await policy.reply(messages, prompt.tools)
            step = await place.ask("step", reply=reply.text)
            metrics |= step["metrics"]
            messages = [*messages, {"role": "assistant", "content": reply.text}, *step["messages"]]
            if step["done"]:
                break
            policy.add_reward(step["reward"])
        ending = await ended(self.rewards, prompt, reply.text, messages, step["reward"])
        return Ending(ending.reward, ending.policy_error, metrics | ending.metrics)


async def ended(rewards: CombinedReward, prompt: Prompt, reply: str, messages: list[Message], earned: float) -> Ending:
    """Return the ending of an episode that has earned so much; the run's rewards, if there are any, are added."""
    if not rewards.parts:
        return Ending(earned)
    return await judged(rewards, prompt, reply, messages[len(prompt.messages) :], earned)


class ToolUse(Hosted):
    """The policy calls tools until it answers without; the run's rewards judge that answer."""

    def __init__(self, hosts: Hosts, rewards: CombinedReward, parse: Parse) -> None:
        super().__init__(hosts, rewards)
        self.parse = parse
        self.calls = self.mistakes = 0

    async def play(self, policy: Policy, prompt: Prompt) -> Ending:
        place = await self.place()
        self.calls = self.mistakes = 0
        messages, reply, ids = prompt.messages, None, numbered("call")
        try:
            while True:
                reply = await policy.reply(messages, prompt.tools, lambda text: as_message(self.parse(text), ids))
                parsed = self.parse(reply.text)
                if not parsed.calls and not parsed.error:
                    break
                messages = [*messages, reply.message, *await self._answers(place, parsed, reply)]
        except OutOfBudget:
            if reply is None:
                raise
        used = {"tools/calls": float(self.calls), "tools/mistakes": float(self.mistakes)}
        said = [*messages, reply.message][len(prompt.messages) :]
        ending = await judged(self.rewards, prompt, reply.text, said)
        return Ending(ending.reward, ending.policy_error, used | ending.metrics)

    async def _answers(self, place: Place, parsed: Parsed, reply: Reply) -> list[Message]:
        if parsed.error:
            self.mistakes += 1
            return [{"role": "tool", "name": "error", "content": f"error: {parsed.error}"}]
        named = reply.message["tool_calls"]
        texts = await asyncio.gather(*(self._answer(place, call) for call in parsed.calls))
        return [
            {"role": "tool", "tool_call_id": made["id"], "name": call.name, "content": text}
            for made, call, text in zip(named, parsed.calls, texts, strict=True)
        ]

    async def _answer(self, place: Place, call: ToolCall) -> str:
        self.calls += 1
        try:
            return str(await place.ask("call", name=call.name, arguments=call.arguments))
        except Mistake as mistake:
            self.mistakes += 1
            return f"error: {mistake}"


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

    async def play(self, policy: Policy, prompt: Prompt) -> Ending:
        place, seat = await self.place(), self.endpoint.open(policy, self.parse)
        try:
            values, url = row_of(prompt), self.endpoint.url
            reward = await place.ask("play", seat.quiet, values=values, url=url, key=seat.key)
        except EnvironmentFailure:
            if seat.failure is not None:
                raise seat.failure from None
            if seat.exhausted:
                raise OutOfBudget(seat.exhausted) from None
            raise
        finally:
            seat.close()
        if seat.failure is not None:
            raise seat.failure
        metrics = {f"agent/overridden/{name}": float(count) for name, count in seat.overridden.items()}
        if seat.structured:
            metrics["agent/structured"] = float(seat.structured)
        if reward is None and not self.rewards.parts:
            raise EnvironmentFailure(f"{place.host.program.words()} returned no reward, and there is no --reward")
        ending = await ended(self.rewards, prompt, seat.last_text, seat.talk, reward or 0.0)
        return Ending(ending.reward, ending.policy_error, metrics | ending.metrics)
