"""verifiers from 0.4 on, as far as one agent that chats about a taskset's tasks goes."""

import contextlib
import importlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import httpx
from pydantic import BaseModel

Data = TypeVar("Data")
Function = Callable[..., Any]


class TaskData(BaseModel):
    prompt: str

    @property
    def prompt_text(self) -> str:
        return self.prompt


def reward(function: Function) -> Function:
    vars(function)["scores"] = "rewards"
    return function


def metric(function: Function) -> Function:
    vars(function)["scores"] = "metrics"
    return function


class Task(Generic[Data]):
    def __init__(self, data: Any, config: Any) -> None:
        self.data = data


class Taskset(Generic[Data]):
    def __init__(self, config: Any) -> None:
        self.config = config

    def __iter__(self) -> Iterator[Any]:
        return iter(self.load())

    def load(self) -> Iterator[Any]:
        raise NotImplementedError


@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str


@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig


@dataclass
class Trace:
    last_reply: str = ""
    rewards: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    errors: list[Any] = field(default_factory=list)

    @property
    def reward(self) -> float:
        return float(sum(self.rewards.values()))


class Environment:
    def __init__(self, config: dict[str, Any]) -> None:
        module = importlib.import_module(config["taskset"]["id"])
        self.taskset = vars(module)[module.__all__[0]](SimpleNamespace(task=None, **config["taskset"]))
        self.is_open = False

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        assert not self.is_open
        self.is_open = True
        yield

    def slots(self, task: Any) -> list[Any]:
        return [task]

    async def run_slot(self, task: Any, context: ModelContext) -> Any:
        assert self.is_open
        trace, client = Trace(), context.client
        headers = {"Authorization": f"Bearer {os.environ[client.api_key_var]}"}
        asked = {"model": context.model, "messages": [{"role": "user", "content": task.data.prompt}]}
        try:
            async with httpx.AsyncClient(base_url=client.base_url, headers=headers, timeout=None) as http:
                response = await http.post("/chat/completions", json=asked)
            trace.last_reply = response.raise_for_status().json()["choices"][0]["message"]["content"]
            for name, function in vars(type(task)).items():
                if callable(function) and "scores" in vars(function):
                    vars(trace)[function.scores][name] = await function(task, trace)
        except Exception as error:  # noqa: BLE001  (as the library does it)
            trace.errors.append(SimpleNamespace(type="TaskError", message=str(error)))
        return SimpleNamespace(ok=not trace.errors, errors=[], traces=[trace])


def default_harness_id(taskset: str) -> str:
    return "bash"


def resolve_env_config(config: dict[str, Any]) -> dict[str, Any]:
    assert config["agent"] == {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    return config


load_environment = Environment
