"""verifiers up to 0.3, as far as environments of several turns with a rubric go."""

import asyncio
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import httpx

from verifiers.types import ClientConfig

Row = dict[str, Any]


class Rubric:
    def __init__(self, funcs: list[Callable[..., Any]], weights: list[float]) -> None:
        self.parts = list(zip(funcs, weights, strict=True))
        self.logger = logging.getLogger("verifiers.rubrics.rubric.Rubric")

    async def score(self, state: Row) -> None:
        state["metrics"], state["reward"] = {}, 0.0
        for part, weight in self.parts:
            try:
                value = float(await part(**state))
            except Exception as error:  # noqa: BLE001  (as the library does it)
                self.logger.error(f"Error calling reward function {part.__name__}: {error}")
                value = 0.0
            state["metrics"][part.__name__] = value
            state["reward"] += weight * value


class MultiTurnEnv:
    def __init__(self, dataset: Any, rubric: Rubric, max_turns: int = -1, system_prompt: str = "") -> None:
        self.rows, self.rubric, self.max_turns, self.system_prompt = dataset, rubric, max_turns, system_prompt

    def get_dataset(self) -> list[Row]:
        system = {"role": "system", "content": self.system_prompt}
        asked = [[system, {"role": "user", "content": row["question"]}] for row in self.rows]
        return [{**row, "example_id": at, "prompt": asked[at]} for at, row in enumerate(self.rows)]

    get_eval_dataset = get_dataset

    async def env_response(self, messages: list[Row], state: Row) -> list[Row]:
        raise NotImplementedError

    async def run_rollout(self, input: Row, client: ClientConfig, model: str, sampling_args: Row) -> Row:
        state: Row = {**input, "completion": [], "error": None}
        headers = {"Authorization": f"Bearer {os.environ[client.api_key_var]}"}
        async with httpx.AsyncClient(base_url=client.api_base_url, headers=headers, timeout=None) as http:
            for turn in range(self.max_turns):
                if turn:
                    state["completion"] += await self.env_response(state["completion"], state)
                asked = {"model": model, "messages": [*input["prompt"], *state["completion"]]}
                response = await http.post("/chat/completions", json=asked)
                if response.status_code != 200:
                    state["error"] = {"error": "ModelError", "error_chain_str": f"ModelError -> {response.text}"}
                    break
                state["completion"].append(response.json()["choices"][0]["message"])
        await self.rubric.score(state)
        await asyncio.sleep(0)
        return {name: state[name] for name in ("reward", "metrics", "error", "completion")}


def load_environment(env_id: str, **arguments: Any) -> MultiTurnEnv:
    found: MultiTurnEnv = importlib.import_module(env_id).load_environment(**arguments)
    return found
