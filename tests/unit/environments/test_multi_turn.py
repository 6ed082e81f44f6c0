"""Environments, tools and agents in processes of their own: what they do wrong is named, and harms nobody else."""

import asyncio
import gc
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.tool_calls import CALCULATOR
from tests.unit.data.test_chat import CHATML
from tests.unit.rollout.test_session import Table
from trueline.config.base import ConfigError
from trueline.config.environment import EnvironmentConfig
from trueline.config.reward import RewardPartConfig
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.environments.hosted import AgentCommand, load_code
from trueline.environments.opening import (
    OBJECTS_BETWEEN_COLLECTIONS,
    OpenEnvironment,
    check_environment,
    describe_environment,
    user_code_of,
)
from trueline.environments.tools.toolbox import Toolbox
from trueline.rewards.combined import CombinedReward
from trueline.rollout.engine import SamplingParams
from trueline.rollout.pool import RolloutKey
from trueline.rollout.summary import transcript
from trueline.runs.processes import failed_call
from trueline.usercode import host as host_module
from trueline.usercode.failures import ProcessLost, UserCodeFailure
from trueline.usercode.host import MARK, EpisodeHosts, EpisodePlace

CODE = '''
import asyncio, ctypes, os, subprocess, sys, threading, time


class Game:
    """Three turns; a reply is what goes wrong."""

    def __init__(self, turns: int = 3):
        self.left = turns

    def reset(self, prompt, label="none"):
        return f"{prompt} {label}"

    def step(self, reply):
        self.left -= 1
        if reply == "raises":
            raise KeyError("board")
        if reply == "leaves":
            sys.exit("enough")
        if reply == "loops in C":
            ctypes.PyDLL(None).sleep(1000)
        if reply == "naps":
            time.sleep(1)
        if reply == "loops":
            while True:
                pass
        if reply == "dies":
            os.kill(os.getpid(), 11)
        if reply == "starts others":
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            time.sleep(1000)
        if reply == "wrong type":
            return object()
        if reply == "nothing":
            return None
        if reply == "unknown key":
            return {"messages": "x", "rewrad": 1}
        if reply == "not finite":
            return float("nan")
        if reply == "prints":
            print("to its output")
        if self.left == 0:
            return {"reward": 1.0, "done": True, "metrics": {"left": self.left, "reward/mean": 9}}
        return {"messages": "go on", "reward": 0.5}

    def close(self):
        with open(os.environ["CLOSED"], "a") as file:
            file.write("closed\\n")


class Waits(Game):
    async def reset(self, prompt):
        await asyncio.sleep(0)
        return [{"role": "system", "content": "play"}, {"role": "user", "content": prompt}]

    async def step(self, reply):
        await asyncio.sleep(0)
        return Game.step(self, reply)


class Farewell(Game):
    def step(self, reply):
        return {"messages": "bye", "reward": 1.0, "done": True}


class Gate(Game):
    """Waits in its step until it is opened, and tells that it is there."""

    def step(self, reply):
        with open(os.environ["CLOSED"] + ".here", "a") as file:
            file.write("here\\n")
        while not os.path.exists(os.environ["CLOSED"] + ".open"):
            time.sleep(0.01)
        return 1.0


class Half:
    def reset(self): ...


async def run(policy, prompt, label):
    first = await policy(prompt)
    second = await policy([{"role": "user", "content": f"Is {first} right?"}])
    return 1.0 if label in second else 0.0


def plain(policy, prompt):
    return len(policy(prompt))


def by_column(policy, function):
    return len(policy(function))


def main(prompt, client):
    messages = [{"role": "user", "content": prompt}]
    answer = client.chat.completions.create(model="any", messages=messages, temperature=0.3)
    messages += [answer.choices[0].message, {"role": "user", "content": "and?"}]
    answer = client.chat.completions.create(model="any", messages=messages)
    return {"silent": None}.get(answer.choices[0].message.content, 2.0)


def sulks(prompt, client):
    client.chat.completions.create(model="any", messages=[{"role": "user", "content": prompt}])
    time.sleep(1000)


async def greedy(prompt, client):
    ask, messages = client.chat.completions.create, [{"role": "user", "content": prompt}]
    answers = await asyncio.gather(*(ask(model="any", messages=messages) for _ in range(200)), return_exceptions=True)
    return sum(not isinstance(one, Exception) for one in answers)


def endless(prompt, client):
    messages = [{"role": "user", "content": prompt}]
    while True:
        answer = client.chat.completions.create(model="any", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "and?"}]


def briefed(prompt, client):
    """An agent with a system prompt of its own, which rewrites what the policy has said."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Task: {prompt}"}]
    for _ in range(2):
        answer = client.chat.completions.create(model="any", messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": answer.upper()}, {"role": "user", "content": "and?"}]
    client.chat.completions.create(model="any", messages=messages)


class Reports(Game):
    """Reports its state in every step."""

    def step(self, reply):
        self.left -= 1
        return {"messages": "go on", "metrics": {"left": self.left}}


def wants(policy, missing): ...


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def spin(seconds: int) -> str:
    """Wait for ever."""
    while True:
        pass


def crash() -> str:
    """Die with the process, as soon as the other call is there."""
    time.sleep(0.5)
    os.kill(os.getpid(), 11)


def wait() -> str:
    """Wait until the gate is open."""
    return str(Gate().step(""))


def divide(a: int, b: int) -> float:
    """Divide."""
    return a / b


async def refuse(how: str) -> str:
    """Refuse in some way."""
    if how == "exits":
        sys.exit(3)
    raise PermissionError("not for you")


def question() -> str:
    """Read what somebody types, though nobody does."""
    return repr(sys.stdin.read())


def broken() -> str:
    """Break."""
    raise RuntimeError("the tool is broken")
'''
PROGRAM = """
import json, os, sys, urllib.request

row = json.load(sys.stdin)
body = {"model": "any", "messages": row["messages"]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"])
print(0.25)
"""
ASKED = Prompt(0, [{"role": "user", "content": "1+1="}], label="yes")
FAULTS = {
    "raises": "KeyError: 'board'",
    "leaves": "SystemExit('enough')",
    "loops": "`step` took more than 2 s (environment.timeout_seconds) and was killed",
    "loops in C": "`step` took more than 2 s (environment.timeout_seconds) and was killed",
    "dies": "died of SIGSEGV",
    "wrong type": "the reward that `step` returned must be a finite number, got <object",
    "nothing": "`step` returned None: return a text to continue, a number to end with that reward, or a dict",
    "unknown key": "`step` returned a dict with 'rewrad': return a text",
    "not finite": "the reward that `step` returned must be a finite number, got nan",
}


class Stage:
    """An environment in its processes, and an engine that says what it is told."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self.folder, self.tokenizer, self.delay = folder, tokenizer, 0.0
        self.script: dict[str, str] = {}
        (folder / "code.py").write_text(CODE)

    def config(self, key: str, names: Any, **keys: Any) -> EnvironmentConfig:
        value = [self.place(name) for name in names] if key == "tools" else self.place(names)
        return EnvironmentConfig(**({key: value, "timeout_seconds": 60, "processes": 1} | keys))

    def place(self, name: str) -> str:
        if name == "calculator":
            return CALCULATOR
        return f"{self.folder}/code.py:{name}" if name.isidentifier() else name

    def play(
        self,
        config: EnvironmentConfig,
        *texts: str,
        episodes: int = 1,
        reward: Any = None,
        context: int = 2000,
        prompt: Prompt = ASKED,
        watch: Callable[[OpenEnvironment], Awaitable[None]] | None = None,
    ) -> list[Trajectory]:
        table = self.table = Table(self.tokenizer, CHATML, *texts, turns=config.max_turns, context=context)
        table.engine.delay, table.engine.script = self.delay, self.script
        rewards = CombinedReward({"reward": (reward, RewardPartConfig())} if reward else {}, 0.0)
        params = SamplingParams(1.0, context // 2, tuple(table.chat.stop_ids))

        async def together() -> list[Trajectory]:
            made = OpenEnvironment(config, rewards, table.chat, self.folder)
            await made.start()
            try:
                runs = [table.episodes.run(made(), prompt, RolloutKey(at, 0, None), params) for at in range(episodes)]
                played = asyncio.gather(*runs)
                if watch is not None:
                    await watch(made)
                return list(await played)
            finally:
                await made.stop()

        return asyncio.run(together())

    def closed(self) -> int:
        file = Path(os.environ["CLOSED"])
        return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture
def stage(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    yield Stage(tmp_path, tokenizer)
    assert not started(str(tmp_path / "closed")), "a process was left behind"


def started(file: str) -> list[int]:
    """Return the processes of user code that this test's environment started."""
    found = [(one.pid, one.info["environ"] or {}) for one in psutil.process_iter(["environ"])]
    return [number for number, variables in found if MARK in variables and variables.get("CLOSED") == file]


@pytest.mark.parametrize("name", ["Game", "Waits"])
def test_a_class_plays_turns_with_rewards(name: str, stage: Stage) -> None:
    (played,) = stage.play(stage.config("function", name), "a", "prints", "c")
    assert (played.outcome, played.reward, played.error) == (Outcome.FINISHED, 2.0, "")
    assert [turn["content"] for turn in played.turns if turn["role"] == "assistant"] == ["a", "prints", "c"]
    assert played.rewards[played.rewards > 0].tolist() == [0.5, 0.5, 1.0]
    own = {"environment/left": 0.0, "environment/reward/mean": 9.0}
    assert played.metrics == {**own, "episode/turns": 3.0, "episode/sequences": 1.0}
    first = "<s>user\n1+1= yes</s>\n" if name == "Game" else "<s>system\nplay</s>\n<s>user\n1+1=</s>\n"
    assert stage.table.text(stage.table.engine.asked[0][0]) == f"{first}<s>assistant\n"
    assert stage.closed() == 1
    assert "to its output" in (stage.folder / "environment.log").read_text()


def test_options_reach_the_class(stage: Stage) -> None:
    (played,) = stage.play(stage.config("function", "Game", options={"turns": 1}), "a")
    assert (played.reward, played.metrics["episode/turns"]) == (1.0, 1.0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_of_the_environment_and_no_zero(fault: str, stage: Stage) -> None:
    seconds = 2 if "loops" in fault else 60
    (played,) = stage.play(stage.config("function", "Game", timeout_seconds=seconds), "a", fault)
    assert (played.outcome, played.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert FAULTS[fault] in played.error and "code.py:Game" in played.error


def test_what_a_step_started_ends_with_it(stage: Stage) -> None:
    (played,) = stage.play(stage.config("function", "Game", timeout_seconds=2), "starts others")
    assert played.outcome is Outcome.ENVIRONMENT_ERROR  # and the fixture looks for what is left


@pytest.mark.parametrize("fault", [pytest.param("loops in C", marks=pytest.mark.slow), "dies"])
def test_a_culprit_does_not_take_other_episodes_with_it(fault: str, stage: Stage) -> None:
    stage.script = {f"train-{group}-0-0": fault if group == 1 else "naps" for group in range(5)}
    seconds = 4 if "loops" in fault else 60
    played = stage.play(stage.config("function", "Game", timeout_seconds=seconds), *["a"] * 40, episodes=5)
    assert FAULTS[fault].replace("2 s", "4 s") in played[1].error
    assert [(one.outcome.is_failure, one.reward) for one in played] == [
        (True, None) if group == 1 else (False, 2.0) for group in range(5)
    ]


def test_many_episodes_at_once_leave_user_code_its_memory(stage: Stage) -> None:
    """A hundred stacks and what threads allocate from would be more than half a GiB of addresses."""
    config = stage.config("function", "Game", memory_gib=0.5, options={"turns": 1})
    played = stage.play(config, *["naps"] * 100, episodes=100)
    assert [one.error for one in played] == [""] * 100


def test_an_episode_by_itself_ends_its_process(stage: Stage) -> None:
    stage.script = {f"train-{group}-0-0": "dies" for group in range(3)}
    played = stage.play(stage.config("function", "Game"), episodes=3)
    assert all("died of SIGSEGV" in one.error and "another episode" not in one.error for one in played)


@pytest.mark.parametrize(("name", "texts", "reward"), [("run", ("2", "yes"), 1.0), ("plain", ("four",), 4.0)])
def test_a_function_plays_whole_episodes(name: str, texts: tuple[str, ...], reward: float, stage: Stage) -> None:
    (played,) = stage.play(stage.config("function", name), *texts)
    assert (played.outcome, played.reward, len(played.sequences())) == (Outcome.FINISHED, reward, len(texts))


def test_columns_may_have_the_name_of_any_parameter(stage: Stage) -> None:
    prompt = Prompt(0, ASKED.messages, columns={"function": "x + 1"})
    (played,) = stage.play(stage.config("function", "by_column"), "four", prompt=prompt)
    assert (played.error, played.reward) == ("", 4.0)


def test_an_agent_asks_through_openais_client(stage: Stage) -> None:
    (played,) = stage.play(stage.config("agent", "main"), "2", "4")
    assert (played.reward, len(played.sequences())) == (2.0, 1)
    assert [turn["content"] for turn in played.turns] == ["2", "and?", "4"]
    assert played.metrics["agent/overridden/temperature"] == 1.0


def test_an_agent_in_another_language_is_a_command(stage: Stage) -> None:
    (stage.folder / "agent.py").write_text(PROGRAM)
    config = EnvironmentConfig(agent=f"python3 {stage.folder}/agent.py", processes=1)
    (played,) = stage.play(config, "2")
    assert (played.outcome, played.reward, played.reply) == (Outcome.FINISHED, 0.25, "2")


def test_an_agent_without_a_verdict_needs_a_reward(stage: Stage) -> None:
    class Long:
        async def score(self, call: dict[str, Any]) -> float:
            assert [turn["content"] for turn in call["turns"]] == ["2", "and?", "silent"]
            return 0.75

        async def stop(self) -> None: ...

    (played,) = stage.play(stage.config("agent", "main"), "2", "silent")
    assert played.outcome is Outcome.ENVIRONMENT_ERROR and "returned no reward" in played.error
    (played,) = stage.play(stage.config("agent", "main"), "2", "silent", reward=Long())
    assert (played.outcome, played.reward) == (Outcome.FINISHED, 0.75)


def test_an_agent_that_never_answers_is_ended(stage: Stage) -> None:
    (played,) = stage.play(stage.config("agent", "sulks", timeout_seconds=2), "2")
    assert played.outcome is Outcome.ENVIRONMENT_ERROR and "`play` took more than 2 s" in played.error


@pytest.mark.slow
def test_an_agent_is_not_blamed_for_a_slow_policy(stage: Stage) -> None:
    """Two replies of five seconds each are more than its limit of eight; its own silence is not."""
    stage.delay = 5.0
    (played,) = stage.play(stage.config("agent", "main", timeout_seconds=8), "2", "4")
    assert (played.outcome, played.reward) == (Outcome.FINISHED, 2.0)


def test_an_agent_may_ask_for_much_and_gets_its_turns(stage: Stage) -> None:
    (played,) = stage.play(stage.config("agent", "greedy", max_turns=5), *["2"] * 200)
    assert played.reward == 5.0 and len(played.sequences()) == 5 and played.outcome is Outcome.TRUNCATED


def test_an_agent_that_does_not_end_is_cut_off(stage: Stage) -> None:
    (played,) = stage.play(stage.config("agent", "endless", max_turns=4), *"23456")
    assert (played.outcome, played.reward, len(stage.table.engine.said)) == (Outcome.TRUNCATED, 0.0, 4)


def calling(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


class Told:
    """A reward that remembers what it was given."""

    def __init__(self) -> None:
        self.turns: list[Any] = []
        self.messages: list[Any] = []
        self.reply = ""

    async def score(self, call: dict[str, Any]) -> float:
        self.turns, self.messages, self.reply = call["turns"], call["messages"], call["reply"]
        return 1.0

    async def stop(self) -> None: ...


def test_tools_are_called_and_their_results_told(stage: Stage) -> None:
    reward = Told()
    texts = [calling("add", '{"a": 1, "b": 2}'), calling("calculator", '{"expression": "2*3"}') * 2, "done"]
    (played,) = stage.play(stage.config("tools", ["add", "calculator"]), *texts, reward=reward)
    assert (played.outcome, played.reward, played.reply) == (Outcome.FINISHED, 1.0, "done")
    results = [turn["content"] for turn in reward.turns if turn["role"] == "tool"]
    assert results == ["3", "6", "6"] and reward.turns[-1]["content"] == "done"
    assert (played.metrics["tools/calls"], played.metrics["tools/mistakes"]) == (3.0, 0.0)
    assert len(played.sequences()) == 1


def test_mistakes_of_the_policy_are_told_to_it(stage: Stage) -> None:
    texts = ["<tool_call>{bad", calling("add", '{"a": "x"}'), calling("nobody", "{}"), "done"]
    (played,) = stage.play(stage.config("tools", ["add"]), *texts, reward=Told())
    assert (played.outcome, played.reward) == (Outcome.FINISHED, 1.0)
    told = [turn for turn in played.turns if turn["role"] == "tool"]
    assert all(turn["content"].startswith("error: ") for turn in told)
    ids, names = ["call00001", "call00002", "call00003"], ["error", "add", "nobody"]
    assert ([turn["tool_call_id"] for turn in told], [turn["name"] for turn in told]) == (ids, names)
    assert played.metrics["tools/mistakes"] == 3.0


def test_a_tool_that_does_not_return_is_no_fault_of_the_policy(stage: Stage) -> None:
    config = stage.config("tools", ["spin"], timeout_seconds=2)
    (played,) = stage.play(config, calling("spin", '{"seconds": 1}'), "done", reward=Told())
    assert (played.outcome, played.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert "`call` took more than 2 s" in played.error


def test_what_a_users_tool_raises_is_told_to_the_model_and_counted(stage: Stage) -> None:
    """Else the model could end its own run, by dividing by zero."""
    calls = [calling("divide", '{"a": 1, "b": 0}'), calling("refuse", '{"how": "exits"}') + calling("broken", "{}")]
    config = stage.config("tools", ["divide", "refuse", "broken"])
    (played,) = stage.play(config, *calls, calling("refuse", '{"how": "raises"}'), "done", reward=Told())
    assert (played.outcome, played.reward, played.error) == (Outcome.FINISHED, 1.0, "")
    assert [turn["content"] for turn in played.turns if turn["role"] == "tool"] == [
        "error: ZeroDivisionError: division by zero",
        "error: RuntimeError: the tool raised SystemExit(3)",
        "error: RuntimeError: the tool is broken",
        "error: PermissionError: not for you",
    ]
    names = ("tools/calls", "tools/errors", "tools/mistakes")
    assert [played.metrics[name] for name in names] == [4.0, 4.0, 0.0]
    assert "return a / b" in (stage.folder / "environment.log").read_text()  # the traceback, for whoever wrote it


def test_code_that_reads_its_input_finds_nothing_there(stage: Stage) -> None:
    """The pipe of requests is not its input: it would wait there for ever, or take what others ask."""
    config = stage.config("tools", ["question"], timeout_seconds=20)
    (played,) = stage.play(config, calling("question", "{}"), "done", reward=Told())
    assert [turn["content"] for turn in played.turns if turn["role"] == "tool"] == ["''"], played.error


def test_what_a_tool_refuses_is_a_mistake_and_no_error(stage: Stage) -> None:
    config = stage.config("tools", ["calculator"])
    (played,) = stage.play(config, calling("calculator", '{"expression": "1/0"}'), "done", reward=Told())
    assert (played.metrics["tools/mistakes"], played.metrics["tools/errors"]) == (1.0, 0.0)


def test_two_calls_of_one_episode_that_end_their_process_are_its_own_fault(stage: Stage) -> None:
    both = calling("crash", "{}") * 2
    (played,) = stage.play(stage.config("tools", ["crash"]), both, "done", reward=Told())
    assert played.outcome is Outcome.ENVIRONMENT_ERROR
    assert "died of SIGSEGV" in played.error and "another episode" not in played.error


def test_an_episode_of_tools_that_runs_out_of_turns_is_judged_as_it_is(stage: Stage) -> None:
    texts = [calling("add", '{"a": 1, "b": 2}')] * 3
    (played,) = stage.play(stage.config("tools", ["add"], max_turns=2), *texts, reward=Told())
    assert (played.outcome, played.reward, played.metrics["tools/calls"]) == (Outcome.TRUNCATED, 1.0, 2.0)


def test_what_can_be_told_before_the_start_is_refused_then(stage: Stage) -> None:
    mistakes = {
        ("function", "Half"): "Half has no method 'step'",
        ("function", "nobody"): "has no function 'nobody'",
        ("function", "wants"): "no value for its parameter 'missing'",
        ("agent", "wants"): "no value for its parameter 'missing'",
        ("tools", ("nobody",)): "has no function 'nobody'",
    }
    for (key, name), words in mistakes.items():
        with pytest.raises(ConfigError, match=words):
            check_environment(stage.config(key, name), ASKED)
    assert check_environment(EnvironmentConfig(), ASKED).tools == []
    (schema,) = check_environment(stage.config("tools", ["add"]), ASKED).tools
    assert schema["function"]["name"] == "add"
    with pytest.raises(ValueError, match=r"environment.agent and environment.tools exclude each other"):
        EnvironmentConfig(agent="a.py:main", tools=["calculator"])


def test_the_plan_says_what_is_played(stage: Stage) -> None:
    table = Table(stage.tokenizer, CHATML)
    assert describe_environment(EnvironmentConfig(), table.chat, 96, "hf") == []
    line, calls = describe_environment(EnvironmentConfig(tools="a.py:f,python"), table.chat, 96, "hf")
    said = "hermes, mistral, llama, json tried in turn: the chat template is of no known format"
    assert calls == f"tool calls {said}"
    said = "turns      up to 8 in sequences of up to 96 tokens: environment.tools=a.py:f python"
    assert line == f"{said} (4 processes, 60 s a step)"
    kinds = {"a.py:main": load_code, "package.module:main": load_code, "node agent.js": AgentCommand}
    for agent, kind in kinds.items():
        code = user_code_of(EnvironmentConfig(agent=agent))
        assert code is not None and code.load is kind


SYSTEM = {"role": "system", "content": "be good"}
THREE, TWO = ["a", "go on", "b", "go on", "c"], ["a", "go on", "b", "go on"]
TOOL, FIRST, LIMIT = ["calculator"], ["be good", "1+1="], {"max_turns": 2}
SAID: dict[str, tuple[str, str | list[str], dict[str, Any], list[str], list[str], list[str]]] = {
    # what plays -> key, name, other keys, replies, what the model was first asked, and all that followed
    "reset drops the data's system message": ("function", "Game", {}, [*"abc"], ["1+1= yes"], THREE),
    "reset adds a system message": ("function", "Waits", {}, [*"abc"], ["play", "1+1="], THREE),
    "the end brings messages": ("function", "Farewell", {}, ["a"], ["1+1= yes"], ["a", "bye"]),
    "a game is out of turns": ("function", "Game", LIMIT, [*"ab"], ["1+1= yes"], TWO),
    "tools": ("tools", TOOL, {}, ["CALL", "done"], FIRST, ["CALL", "6", "done"]),
    "tools are out of turns": ("tools", TOOL, LIMIT, ["CALL", "CALL"], FIRST, ["CALL", "6", "CALL", "6"]),
    "an agent rewrites": (
        "agent",
        "briefed",
        {},
        [*"xyz"],
        ["Be brief.", "Task: 1+1="],
        ["X", "and?", "Y", "and?", "z"],
    ),
    "an agent is out of turns": ("agent", "endless", LIMIT, [*"xy"], ["1+1="], ["x", "and?", "y", "and?"]),
}


@pytest.mark.parametrize("case", SAID)
def test_rewards_and_transcripts_have_what_was_said_once_and_in_order(case: str, stage: Stage) -> None:
    key, names, keys, replies, opening, after = SAID[case]
    call, reward = calling("calculator", '{"expression": "2*3"}'), Told()
    prompt = Prompt(0, [SYSTEM, *ASKED.messages], label="yes")
    texts = [call if text == "CALL" else text for text in replies]
    (played,) = stage.play(stage.config(key, names, **keys), *texts, reward=reward, prompt=prompt)
    assert not played.outcome.is_failure, played.error

    def shown(messages: list[Any]) -> list[str]:
        named = ["CALL" if one.get("tool_calls") or one["content"] == call else one["content"] for one in messages]
        return [str(name) for name in named]

    last = max(at for at, said in enumerate(after) if said in replies)
    assert (shown(reward.turns), shown(reward.messages)) == (after, [*opening, *after[:last]])
    assert reward.reply == texts[-1] and shown(played.turns) == after
    again = failed_call(played)  # what a failed reward is tried again with
    assert (again["turns"], again["messages"], again["reply"]) == (reward.turns, reward.messages, reward.reply)


@pytest.mark.parametrize(("key", "name", "earned"), [("function", "Game", 1.0), ("agent", "endless", 0.0)])
def test_an_episode_that_a_limit_ends_is_judged_or_left_out(key: str, name: str, earned: float, stage: Stage) -> None:
    texts = ["a", "b"]
    (judged,) = stage.play(stage.config(key, name, max_turns=2), *texts, reward=Told())
    assert (judged.outcome, judged.reward) == (Outcome.TRUNCATED, earned + 1.0)
    assert judged.cut_off == transcript(judged, "train")["cut_off"]
    assert judged.cut_off == "the episode has used all its turns (environment.max_turns=2)"
    assert judged.metrics["reward/reward"] == 1.0
    (unjudged,) = stage.play(stage.config(key, name, max_turns=2), *texts)
    assert (unjudged.outcome, unjudged.reward) == (Outcome.TRUNCATED, earned)
    (dropped,) = stage.play(stage.config(key, name, max_turns=2, truncated="drop"), *texts, reward=Told())
    assert (dropped.outcome, dropped.reward) == (Outcome.LEFT_OUT, None)
    assert not dropped.outcome.is_failure and not dropped.outcome.is_scored


@pytest.mark.parametrize("truncated", ["judge", "drop"])
def test_reports_of_an_episode_that_a_limit_ends_are_kept(truncated: str, stage: Stage) -> None:
    """The last one by its name, and the mean of all."""
    (played,) = stage.play(stage.config("function", "Reports", max_turns=2, truncated=truncated), "a", "b")
    assert played.truncated and played.limit == "environment.max_turns"
    assert (played.metrics["environment/left"], played.metrics["environment/left/mean"]) == (1.0, 1.5)
    (once,) = stage.play(stage.config("function", "Reports", max_turns=1), "a")
    assert once.metrics["environment/left"] == 2.0 and "environment/left/mean" not in once.metrics


def test_a_prompt_of_an_agents_own_that_does_not_fit_is_told_in_full(stage: Stage) -> None:
    (played,) = stage.play(stage.config("agent", "endless"), "x", context=8)
    assert played.outcome is Outcome.ENVIRONMENT_ERROR
    assert re.search(
        r"AgentEnvironment ended before the first completion: a conversation of \d+ tokens leaves no room for "
        r"a reply: a sequence may have 8 \(rollout.max_prompt_tokens \+ rollout.max_new_tokens\)",
        played.error,
    )


def here(stage: Stage) -> int:
    file = Path(os.environ["CLOSED"] + ".here")
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.parametrize("kind", ["episodes", "calls"])
def test_more_than_a_process_takes_wait_without_being_judged(kind: str, stage: Stage) -> None:
    """A deadline runs for what `Host.pending` holds, and for nothing else."""
    games = kind == "episodes"
    name: Any = "Gate" if games else ["wait"]
    config = stage.config("function" if games else "tools", name, episodes_per_process=2)
    texts = ["a"] * 5 if games else [calling("wait", "{}") * 5, "done"]

    async def watch(made: OpenEnvironment) -> None:
        assert made.hosts is not None
        (host,) = made.hosts.hosts
        while here(stage) < 2:
            await asyncio.sleep(0.01)
        for _ in range(20):  # in which others would have come, were they let in
            await asyncio.sleep(0.01)
        assert (here(stage), len(host.pending), host.episodes) == (2, 2, 2 if games else 1)
        Path(os.environ["CLOSED"] + ".open").touch()

    played = stage.play(config, *texts, episodes=5 if games else 1, reward=Told(), watch=watch)
    assert [(one.outcome, one.error) for one in played] == [(Outcome.FINISHED, "")] * len(played)
    assert here(stage) == 5


def test_a_process_has_a_thread_for_each_call_that_it_takes(stage: Stage) -> None:
    count = 140

    async def watch(made: OpenEnvironment) -> None:
        for _ in range(6000):
            await asyncio.sleep(0.01)
            if here(stage) == count:
                break
        assert here(stage) == count
        Path(os.environ["CLOSED"] + ".open").touch()

    config = stage.config("tools", ["wait"], episodes_per_process=count)
    (played,) = stage.play(config, calling("wait", "{}") * count, "done", reward=Told(), watch=watch, context=40_000)
    assert (played.outcome, played.metrics["tools/calls"]) == (Outcome.FINISHED, count)


@pytest.mark.slow
def test_a_long_line_of_episodes_loses_none(stage: Stage) -> None:
    """Ten of them wait for each that plays, for longer than any of them may take."""
    config = stage.config("function", "Game", timeout_seconds=6, episodes_per_process=4, options={"turns": 1})
    played = stage.play(config, *["naps"] * 40, episodes=40)
    assert [one.error for one in played] == [""] * 40


def opened(stage: Stage, **keys: Any) -> EpisodeHosts:
    code = user_code_of(stage.config("tools", ["add", "crash", "spin", "wait"], **keys))
    assert code is not None
    return EpisodeHosts(code, 1, stage.folder / "environment.log")


async def added(place: EpisodePlace, **keys: Any) -> Any:
    return await place.call(Toolbox.call, name="add", arguments={"a": 1, "b": 2}, **keys)


def test_a_call_that_waits_while_its_process_dies_is_lost_with_its_state(stage: Stage) -> None:
    async def play() -> None:
        hosts = opened(stage, episodes_per_process=1)
        culprit, other = await hosts.place(alone=False), EpisodePlace(hosts.hosts[0], hosts)
        assert await added(other) == "3"
        first = asyncio.create_task(culprit.call(Toolbox.call, name="crash", arguments={}))
        second = asyncio.create_task(added(other))
        with pytest.raises(UserCodeFailure, match="died of SIGSEGV"):
            await first
        with pytest.raises(ProcessLost, match="its process was killed because of another episode"):
            await second
        await hosts.stop()

    asyncio.run(play())


def test_the_collector_does_not_hold_up_many_episodes(stage: Stage) -> None:
    before = gc.get_threshold()
    gc.set_threshold(700)
    stage.play(stage.config("tools", ["calculator"]), "2")
    assert gc.get_threshold()[0] == OBJECTS_BETWEEN_COLLECTIONS
    gc.set_threshold(*before)


def test_a_call_that_was_given_up_keeps_its_thread_and_its_deadline(stage: Stage) -> None:
    async def play() -> None:
        hosts = opened(stage, episodes_per_process=1, timeout_seconds=5)
        host, place = hosts.hosts[0], await hosts.place(alone=False)
        endless = asyncio.create_task(place.call(Toolbox.call, name="spin", arguments={"seconds": 1}))
        while not host._at_work():
            await asyncio.sleep(0.01)
        endless.cancel()
        await asyncio.wait([endless])
        assert host.free_threads.locked() and host._at_work()
        assert await added(EpisodePlace(host, hosts)) == "3"  # once the deadline has freed the thread
        assert host.life == 2
        await hosts.stop()

    asyncio.run(play())


def test_an_overdue_call_is_blamed_alone_where_its_process_still_answers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "PING_SECONDS", 30.0)

    async def play() -> None:
        hosts = opened(stage, timeout_seconds=3)
        overdue, other = await hosts.place(alone=False), EpisodePlace(hosts.hosts[0], hosts)
        first = asyncio.create_task(overdue.call(Toolbox.call, name="wait", arguments={}))
        never_overdue = other.call(Toolbox.call, lambda: None, name="wait", arguments={})
        second = asyncio.create_task(never_overdue)
        with pytest.raises(UserCodeFailure, match=r"`call` took more than 3 s \(environment") as failed:
            await first
        with pytest.raises(ProcessLost, match="its process was killed because of another episode"):
            await second
        assert not isinstance(failed.value, ProcessLost) and not other.is_suspect
        await hosts.stop()

    asyncio.run(play())


def test_a_call_that_finds_its_process_dead_leaves_no_other_waiting(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process must not start before the calls of the dead one have failed: nobody would answer them."""
    is_late, wait_for_end = asyncio.Event(), host_module.ChildProcess.wait_for_end

    async def wait_longer(child: host_module.ChildProcess) -> str:
        await is_late.wait()
        return await wait_for_end(child)

    monkeypatch.setattr(host_module.ChildProcess, "wait_for_end", wait_longer)

    async def play() -> None:
        hosts = opened(stage)
        host = hosts.hosts[0]
        waits, late = await hosts.place(alone=False), await hosts.place(alone=False)
        first = asyncio.create_task(waits.call(Toolbox.call, name="wait", arguments={}))
        while not (host.about and host._at_work()):
            await asyncio.sleep(0.01)
        assert host.child.process is not None
        host.child.process.kill()
        host.child.process.wait()
        second = asyncio.create_task(added(late))
        await asyncio.sleep(0.1)  # in which it would start a process
        is_late.set()
        with pytest.raises(UserCodeFailure, match="its process died of SIGKILL"):
            await first
        assert await second == "3" and host.life == 2
        await hosts.stop()

    asyncio.run(play())


def test_silence_before_a_process_has_started_is_not_an_agents(stage: Stage) -> None:
    async def play() -> None:
        hosts = opened(stage)
        place = await hosts.place(alone=False)
        call = place.call(Toolbox.call, lambda: time.monotonic() - 1000, name="wait", arguments={})
        asked = asyncio.create_task(call)
        while not here(stage):
            await asyncio.sleep(0.01)
        await asyncio.wait([asked], timeout=0.5)  # in which it would be killed
        Path(os.environ["CLOSED"] + ".open").touch()
        assert (await asked, hosts.hosts[0].life) == ("1.0", 1)
        await hosts.stop()
        with pytest.raises(UserCodeFailure, match="its process was stopped"):
            await added(await hosts.place(alone=False))  # of an episode that waited for its place

    asyncio.run(play())


def test_an_engine_that_fails_under_an_agent_fails_the_run(stage: Stage) -> None:
    with pytest.raises(IndexError):  # the engine has nothing more to say
        stage.play(stage.config("agent", "main"), "2")


SMOLAGENTS = """
def main(prompt, base_url, api_key):
    from smolagents import CodeAgent, OpenAIServerModel

    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    return float(CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=0).run(prompt) == 4)
"""


def test_an_agent_of_smolagents_plays(stage: Stage) -> None:
    """Its first step computes, its second answers; it writes into what was said, so that each is a sequence."""
    pytest.importorskip("smolagents")
    (stage.folder / "smol.py").write_text(SMOLAGENTS)
    config = EnvironmentConfig(agent=f"{stage.folder}/smol.py:main", processes=1, timeout_seconds=600)
    texts = ["Thought: add.\n<code>\nx = 2 + 2\nprint(x)\n</code>", "It is 4.\n<code>\nfinal_answer(x)\n</code>"]
    (played,) = stage.play(config, *texts, context=20_000)
    assert (played.outcome, played.reward, played.error) == (Outcome.FINISHED, 1.0, "")
    assert (played.metrics["episode/turns"], len(played.sequences())) == (2.0, 2)
