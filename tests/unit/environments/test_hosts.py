"""Environments, tools and agents in processes of their own: what they do wrong is named, and harms nobody else."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from tests.unit.data.test_chat import CHATML
from tests.unit.rollout.test_session import Table
from trueline.config.base import ConfigError
from trueline.config.environment import EnvironmentConfig
from trueline.config.reward import RewardPartConfig
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.environments.opening import OpenEnvironment, check_environment, describe_environment, program_of
from trueline.rewards.child import MARK
from trueline.rewards.combined import CombinedReward
from trueline.rollout.engine import SamplingParams
from trueline.rollout.session import Ticket

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


class Half:
    def reset(self): ...


async def run(policy, prompt, label):
    first = await policy(prompt)
    second = await policy([{"role": "user", "content": f"Is {first} right?"}])
    return 1.0 if label in second else 0.0


def plain(policy, prompt):
    return len(policy(prompt))


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


def wants(prompt, missing): ...


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
    "loops": "`step` took more than 2 s and was killed",
    "loops in C": "`step` took more than 2 s and was killed",
    "dies": "died of SIGSEGV",
    "wrong type": "a reward must be a finite number, got <object",
    "nothing": "a reward must be a finite number, got None",
    "unknown key": "`step` returned 'rewrad'",
    "not finite": "a reward must be a finite number, got nan",
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
        return f"{self.folder}/code.py:{name}" if name.isidentifier() and name != "calculator" else name

    def play(
        self, config: EnvironmentConfig, *texts: str, episodes: int = 1, reward: Any = None, context: int = 2000
    ) -> list[Trajectory]:
        table = self.table = Table(self.tokenizer, CHATML, *texts, turns=config.max_turns, context=context)
        table.engine.delay, table.engine.script = self.delay, self.script
        rewards = CombinedReward({"reward": (reward, RewardPartConfig())} if reward else {}, 0.0)
        params = SamplingParams(1.0, context // 2, tuple(table.chat.stop_ids))

        async def together() -> list[Trajectory]:
            made = OpenEnvironment(config, rewards, table.chat, self.folder)
            await made.start()
            try:
                runs = [table.episodes.run(made(), ASKED, Ticket(at, 0, None), params) for at in range(episodes)]
                return list(await asyncio.gather(*runs))
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
    opened = stage.table.text(stage.table.engine.asked[0][0])
    assert opened == ("<s>user\n1+1= yes</s>\n" if name == "Game" else "<s>system\nplay</s>\n<s>user\n1+1=</s>\n") + (
        "<s>assistant\n"
    )
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


@pytest.mark.parametrize("fault", ["loops in C", "dies"])
def test_a_culprit_does_not_take_other_episodes_with_it(fault: str, stage: Stage) -> None:
    stage.script = {f"train-{group}-0-0": fault if group == 1 else "naps" for group in range(5)}
    played = stage.play(stage.config("function", "Game", timeout_seconds=4), *["a"] * 40, episodes=5)
    assert FAULTS[fault].replace("2 s", "4 s") in played[1].error
    assert [(one.outcome.failed, one.reward) for one in played] == [
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

    async def score(self, call: dict[str, Any]) -> float:
        self.turns = call["turns"]
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
    assert all(turn["content"].startswith("error: ") for turn in played.turns if turn["role"] == "tool")
    assert played.metrics["tools/mistakes"] == 3.0


@pytest.mark.parametrize(("name", "words"), [("spin", "`call` took more than 2 s"), ("broken", "the tool is broken")])
def test_tools_that_fail_are_no_fault_of_the_policy(name: str, words: str, stage: Stage) -> None:
    arguments = '{"seconds": 1}' if name == "spin" else "{}"
    (played,) = stage.play(
        stage.config("tools", [name], timeout_seconds=2), calling(name, arguments), "done", reward=Told()
    )
    assert (played.outcome, played.reward) == (Outcome.ENVIRONMENT_ERROR, None) and words in played.error


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
    assert check_environment(EnvironmentConfig(), ASKED) == []
    (schema,) = check_environment(stage.config("tools", ["add"]), ASKED)
    assert schema["function"]["name"] == "add"
    with pytest.raises(ValueError, match=r"environment.agent and environment.tools exclude each other"):
        EnvironmentConfig(agent="a.py:main", tools=["calculator"])


def test_the_plan_says_what_is_played(stage: Stage) -> None:
    table = Table(stage.tokenizer, CHATML)
    assert describe_environment(EnvironmentConfig(), table.chat) == []
    (line,) = describe_environment(EnvironmentConfig(tools="calculator,python"), table.chat)
    assert line == "turns      up to 8: environment.tools=calculator python (4 processes, 60 s a step)"
    kinds = {"a.py:main": "function", "package.module:main": "function", "node agent.js": "program"}
    for agent, kind in kinds.items():
        program = program_of(EnvironmentConfig(agent=agent))
        assert program is not None and program.kind == kind


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
