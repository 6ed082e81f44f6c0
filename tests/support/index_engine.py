"""An engine that says which completion it is, and a reward that looks it up."""

import asyncio
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerFast

from trueline.data.pictures import Shown
from trueline.data.types import Completion, Prompt
from trueline.rewards.base import RewardFailure
from trueline.rollout.engine import SamplingParams

STOP = 2
PARAMS = SamplingParams(1.0, 8, (STOP,))
FAILS = None  # in a table of rewards


class IndexEngine:
    """The reply is the answer's index; every call is remembered."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.name, self.tokenizer = "engine", tokenizer
        self.requests: dict[str, tuple[str, int | None]] = {}  # -> prompt and seed
        self.running = self.most_running = 0
        self.delay: Callable[[str], float] = lambda prompt: 0.0

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        return await self.generate(*args)

    async def generate(
        self, tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
    ) -> Completion:
        prompt = self.tokenizer.decode(tokens)
        assert request not in self.requests, "two requests have one name"
        self.requests[request] = (prompt, params.seed)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.delay(prompt))
        self.running -= 1
        answer = [*self.tokenizer(request.split("-")[2])["input_ids"], STOP]
        return Completion.of(answer, [-1.0] * len(answer), 0, "stop")

    def submit(self, method: Callable[..., Any], *args: Any) -> Any:
        raise NotImplementedError

    def stop(self) -> None:
        pass


class TableReward:
    """Row by the prompt's label, column by the reply."""

    def __init__(self, table: dict[str, list[float | None]]) -> None:
        self.table = table

    async def score(self, call: dict[str, Any]) -> float:
        reward = self.table[call["label"]][int(call["reply"])]
        if reward is FAILS:
            raise RewardFailure(f"no reward for {call['label']}")
        return reward

    async def stop(self) -> None:
        pass


def prompts(*labels: str) -> list[Prompt]:
    return [Prompt(number, [{"role": "user", "content": label}], label) for number, label in enumerate(labels)]
