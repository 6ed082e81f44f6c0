"""Runs in the interpreter that has verifiers, and imports nothing of ours: writes rows, or plays episodes.

`PYTHON verifiers_program.py rows|play NAME ARGUMENTS`. Everything travels as JSON lines over standard input and output.
"""

import asyncio
import contextlib
import importlib.util
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TextIO

Row = dict[str, Any]
MODEL = "policy"
NO_RETRIES = 0  # the policy's endpoint replies or the episode has failed
FAILURES: ContextVar[list[str]] = ContextVar("FAILURES")  # of the rubric, in this episode


class RubricFailures(logging.Handler):
    """Keeps the errors that rubrics log: a reward function that raised an exception counts as 0 there."""

    def emit(self, record: logging.LogRecord) -> None:
        if ".rubrics." in record.name:
            FAILURES.get([]).append(record.getMessage())


class ClassicEnvironment:
    """An environment of verifiers up to 0.3, whose package has `load_environment`; its rows are its dataset's."""

    def __init__(self, name: str, arguments: Row) -> None:
        import verifiers  # noqa: PLC0415  (only this class needs it)

        self.environment = verifiers.load_environment(name, **arguments)
        logging.getLogger("verifiers").addHandler(RubricFailures(logging.ERROR))

    def rows(self, split: str) -> Iterator[Row]:
        dataset = self.environment.get_eval_dataset() if split == "eval" else self.environment.get_dataset()
        yield from (dict(row) for row in dataset)

    async def play(self, values: Row, url: str, key_variable: str) -> Row:
        from verifiers.types import ClientConfig  # noqa: PLC0415

        given = {name: values[name] for name in ("answer", "info", "task") if values.get(name) is not None}
        number = values.get("example_id") or 0
        row = {"answer": values.get("label") or "", **given, "example_id": number, "prompt": values["messages"]}
        client = ClientConfig(api_base_url=url, api_key_var=key_variable, max_retries=NO_RETRIES)
        failures: list[str] = []
        FAILURES.set(failures)
        found = await self.environment.run_rollout(row, client, MODEL, {})
        error = found.get("error") or "; ".join(failures)
        error = error if isinstance(error, str) else f"{error['error']}: {error['error_chain_str']}"
        return {"reward": found["reward"], "metrics": found.get("metrics") or {}, "error": error}


class TasksetEnvironment:
    """An environment of verifiers from 0.4 on: a taskset that agents play; a row names its task by number."""

    def __init__(self, name: str, arguments: Row) -> None:
        import verifiers.v1 as verifiers  # noqa: PLC0415  (only this class needs it)

        # On this machine, a chat instead of a shell, which would run the model's commands here.
        harness = verifiers.default_harness_id(name)
        agent = {
            "harness": {"id": "null" if harness == "bash" else harness},
            "runtime": {"type": "subprocess"},
            **arguments.pop("agent", {}),
        }
        taskset = {"id": name, **arguments.pop("taskset", {})}
        config = verifiers.resolve_env_config({"taskset": taskset, "agent": agent, **arguments})
        self.verifiers, self.environment = verifiers, verifiers.load_environment(config)
        self.serving = contextlib.AsyncExitStack()
        self.opening = asyncio.Lock()
        self.is_open = False

    def rows(self, split: str) -> Iterator[Row]:
        for number, task in enumerate(self.environment.taskset):
            yield {"prompt": task.data.prompt_text or f"task {number}", "task_index": number}

    async def play(self, values: Row, url: str, key_variable: str) -> Row:
        async with self.opening:
            if not self.is_open:
                await self.serving.enter_async_context(self.environment.serving())
                self.is_open = True
        number = int(values["task_index"])
        task = next(itertools.islice(self.environment.taskset, number, None))
        client = self.verifiers.EvalClientConfig(base_url=url, api_key_var=key_variable)
        context = self.verifiers.ModelContext(model=MODEL, client=client)
        episode = await self.environment.run_slot(self.environment.slots(task)[0], context)
        traces = episode.traces
        errors = [] if episode.ok else [*episode.errors, *(error for trace in traces for error in trace.errors)]
        return {
            "reward": sum(trace.reward for trace in traces) if any(trace.rewards for trace in traces) else None,
            "metrics": {name: value for trace in traces for name, value in trace.metrics.items() if value is not None},
            "error": f"{errors[-1].type}: {errors[-1].message}" if errors else "" if episode.ok else "it is not ok",
        }


def load(name: str, arguments: Row) -> Any:
    is_classic = importlib.util.find_spec("verifiers.types") is not None
    return (ClassicEnvironment if is_classic else TasksetEnvironment)(name, arguments)


class EpisodePlayer:
    """Plays the episodes that it is sent, many at a time, and writes a line about each."""

    def __init__(self, lines: TextIO) -> None:
        self.lines = lines
        self.environment: Any = None
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def write(self, **line: Any) -> None:
        self.lines.write(json.dumps(line, default=str) + "\n")
        self.lines.flush()

    @contextlib.contextmanager
    def reporting(self, **about: Any) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  (the boundary where an environment's code runs)
            self.write(**about, error=f"{type(error).__name__}: {error}")

    async def play(self, episode: str, values: Row, url: str, key: str) -> None:
        variable = f"TRUELINE_KEY_{episode}"  # verifiers reads a key from the variable that a client's config names
        os.environ[variable] = key
        try:
            with self.reporting(episode=episode):
                self.write(episode=episode, **await self.environment.play(values, url, variable))
        finally:
            del os.environ[variable]
            self.tasks.pop(episode, None)

    def begin(self, line: str) -> None:
        request = json.loads(line)
        if "values" in request:
            self.tasks[request["episode"]] = asyncio.create_task(self.play(**request))
        elif task := self.tasks.get(request["episode"]):
            task.cancel()

    async def serve(self) -> None:
        self.write(ready=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            self.begin(line)


def main(mode: str, name: str, arguments: str, split: str = "train") -> None:
    player = EpisodePlayer(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # what libraries print is no line of ours
    sys.path.insert(0, os.getcwd())
    with player.reporting():
        player.environment = load(name, json.loads(arguments))
        for row in player.environment.rows(split) if mode == "rows" else ():
            player.write(row=row)
    if player.environment is not None and mode == "play":
        asyncio.run(player.serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
