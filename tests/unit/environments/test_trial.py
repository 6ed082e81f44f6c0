"""An episode with a made-up reply before models load: what no run could use is refused, and nothing else."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from trueline.config.base import ConfigError
from trueline.config.environment import EnvironmentConfig
from trueline.data.types import Prompt
from trueline.environments import opening
from trueline.environments.opening import EnvironmentCheck, check_environment

CODE = '''
import os, sys, time


class Game:
    """Its option tells what it does."""

    def __init__(self, what="ends"):
        self.what = what
        if what == "cannot be made":
            raise RuntimeError("no board")

    def reset(self, prompt):
        if self.what == "resets to a pair":
            return "go", {}
        if self.what == "resets by other roles":
            return [{"role": "human", "content": "go"}]
        return "go"

    def step(self, reply):
        print("step", file=sys.stderr)
        if self.what == "naps":
            time.sleep(1000)
        if self.what == "blames":
            return {"yes": 1.0}[reply]
        return {
            "ends": 1.0,
            "goes on": "more",
            "five": ("seen", 1.0, True, False, {}),
            "nothing": None,
            "names of others": {"observation": "x", "terminated": True},
            "text metric": {"reward": 1.0, "done": True, "metrics": {"level": "hard"}},
            "list of metrics": {"reward": 1.0, "done": True, "metrics": [1.0]},
        }[self.what]

    def close(self):
        with open(os.environ["CLOSED"], "a") as file:
            file.write("closed ")


class Asynchronous:
    async def reset(self, prompt):
        return "go"

    def step(self, reply):
        return self.judge(reply)

    async def judge(self, reply):
        return float(len(reply))


class WithoutReply:
    def reset(self, prompt):
        return "go"

    def step(self):
        return 1.0


class Seeded:
    def __init__(self, seed=0): ...

    def reset(self, seed):
        return "go"

    def step(self, reply):
        return 1.0


def silent(policy):
    return 1.0


def alone(prompt):
    return 1.0


def unrewarded(policy):
    policy("hello")


async def praised(policy):
    await policy("hello")
    return "good"


def endless(policy):
    while True:
        policy("hello")


async def forgets(policy):
    return float("yes" in policy("hello"))


def formal(client):
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    messages = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(model="policy", messages=messages, response_format=shape)
    return float("a" in answer.choices[0].message.content)


def forced(client):
    tool = {"type": "function", "function": {"name": "draw", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": "hello"}]
    kept = {"tools": [tool], "tool_choice": "required"}
    answer = client.chat.completions.create(model="policy", messages=messages, **kept)
    return float(len(answer.choices[0].message.tool_calls))


def early(policy):
    raise PermissionError("no key")
'''
ROW = Prompt(0, [{"role": "user", "content": "1+1="}])
RESULT = "return a text to continue, a number to end with that reward, or a dict such as"
REFUSED = {
    "cannot be made": 'code.py", line 11, in __init__\n.*RuntimeError: no board',
    "resets to a pair": r"`reset` returned \('go', \{\}\) of type tuple as messages: return a text or a list of",
    "resets by other roles": "`reset` returned .*with the roles system, user, assistant, tool",
    "five": rf"`step` returned \('seen', 1.0, True, False, \{{\}}\): {RESULT}",
    "nothing": f"`step` returned None: {RESULT}",
    "names of others": f"`step` returned a dict with 'observation', 'terminated': {RESULT}",
    "text metric": "the metric 'level' of `step` must be a finite number, got 'hard'",
    "list of metrics": r"`step` returned the metrics \[1.0\]: return a dict of numbers by name",
}


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    (tmp_path / "code.py").write_text(CODE)
    return tmp_path / "code.py"


def look(place: str, *, rewarded: bool = False, **keys: Any) -> EnvironmentCheck:
    key = "agent" if " " in place else "function"
    return check_environment(EnvironmentConfig(**{key: place, **keys}), ROW, rewarded=rewarded)


def refused(place: str, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        look(place, **keys)
    assert "/trueline/" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_run_could_use_is_refused(what: str, code: Path) -> None:
    said = refused(f"{code}:Game", options={"what": what})
    assert said.startswith(f"environment.function={code}:Game: ") and re.search(REFUSED[what], said, re.DOTALL), said


@pytest.mark.parametrize("what", ["ends", "goes on"])
def test_what_a_run_can_use_is_not(what: str, code: Path) -> None:
    """It is closed as any episode is."""
    assert look(f"{code}:Game", options={"what": what}) == EnvironmentCheck()
    assert (code.parent / "closed").read_text() == "closed "


def test_asynchronous_methods_mix_with_others(code: Path) -> None:
    assert look(f"{code}:Asynchronous") == EnvironmentCheck()


def test_a_failure_after_the_made_up_reply_is_a_warning(code: Path) -> None:
    """For the model may never say such a thing."""
    (found,) = look(f"{code}:Game", options={"what": "blames"}).warnings
    said, key = found.what, found.key
    assert "failed on the made-up reply 'I do not know.': KeyError: 'I do not know.'; such episodes have no" in said
    assert key == "environment.function"


def test_what_takes_longer_is_no_mistake(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "TRIAL_SECONDS", 1.0)
    monkeypatch.setattr(opening, "CLOSE_SECONDS", 1.0)
    assert look(f"{code}:Game", options={"what": "naps"}) == EnvironmentCheck()


def test_a_trial_can_be_left_out(code: Path) -> None:
    assert look(f"{code}:Game", options={"what": "five"}, trial=False) == EnvironmentCheck()
    assert not (code.parent / "closed").exists()


def test_what_stands_in_the_code_is_refused_without_a_trial(code: Path) -> None:
    assert "environment.options.size: there is no such option; there are what" in refused(
        f"{code}:Game", options={"size": 3}, trial=False
    )
    assert "is given the reply: write def step(self, reply)" in refused(f"{code}:WithoutReply", trial=False)
    assert "no value for its parameter 'seed'" in refused(f"{code}:Seeded", options={"seed": 1}, trial=False)
    assert "takes none of policy, client, base_url, api_key" in refused(f"{code}:alone", trial=False)
    assert "environment.options.x: there is no such option; there are none" in refused(
        f"{code}:silent", options={"x": 1}, trial=False
    )
    assert "name a class or a function of a file or module, as file.py:Name" in refused(str(code), trial=False)


def test_functions_that_play_are_tried_too(code: Path) -> None:
    assert "a trial episode ended before it asked the model for a reply" in refused(f"{code}:silent")
    assert "unrewarded: it returned no reward, and there is no --reward" in refused(f"{code}:unrewarded")
    assert look(f"{code}:unrewarded", rewarded=True) == EnvironmentCheck()
    assert "the reward that it returned must be a finite number, got 'good'" in refused(f"{code}:praised")
    assert "PermissionError: no key" in refused(f"{code}:early")
    assert "TypeError: argument of type 'coroutine' is not iterable" in refused(f"{code}:forgets")
    assert look(f"{code}:endless") == EnvironmentCheck()


@pytest.mark.parametrize("name", ["formal", "forced"])
def test_agents_that_ask_for_a_format_are_left_to_the_run(name: str, code: Path) -> None:
    """No made-up reply has it."""
    assert look(f"{code}:{name}") == EnvironmentCheck()


def test_commands_are_tried_too(code: Path) -> None:
    assert "there is no command 'no-such-agent' that can be run" in refused("no-such-agent --fast")
    said = refused(f"{sys.executable} nowhere.py")
    assert "ended with status 2; it printed: " in said and "can't open file" in said
    (code.parent / "quiet.py").write_text("print('bye')")
    assert "ended before it asked the model for a reply" in refused(f"{sys.executable} {code.parent}/quiet.py")
    with pytest.raises(ConfigError, match=r"environment.agent=node 'agent.js: No closing quotation; close its"):
        look("node 'agent.js")


def test_a_server_without_tools_is_refused(code: Path) -> None:
    pytest.importorskip("mcp")
    (code.parent / "server.py").write_text("from mcp.server import MCPServer\nMCPServer('none').run()\n")
    (code.parent / "dead.py").write_text("raise SystemExit('no database')")
    servers = {
        "server.py": "offers no tools: check it, or leave it out",
        "dead.py": "does not answer: .*it printed: no database",
    }
    for file, words in servers.items():
        config = EnvironmentConfig(tools=[f"mcp:{sys.executable} {code.parent}/{file}"])
        with pytest.raises(ConfigError, match=words):
            check_environment(config, ROW)
