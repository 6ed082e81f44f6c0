"""Processor time of a turn with a slow tool, in the process that plays the episodes and in those of the tools.

    python benchmarks/tool_turns.py [--episodes 2000] [--turns 8] [--seconds 0.2] [--workers 0] [--blocking] [--out F]

All episodes begin at once. The policy calls a tool in every turn but the last. No model samples: calls and answers are
made up and returned at once. Tokens are bytes; the chat template writes calls as Qwen2.5's does. The tool is a
coroutine, or with `--blocking` a function that sleeps in a thread. With `--workers`, so many rollout workers play the
episodes in Ray processes, in groups of eight, and what they return stays in the object store. Other programs change the
episodes per second, but hardly the processor time.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from random_model import make_parser, write_result

from trueline.config.environment import EnvironmentConfig
from trueline.data.chat import ChatFormat
from trueline.data.types import Completion, Prompt
from trueline.demo.material import make_tokenizer
from trueline.environments.opening import OpenEnvironment, check_environment
from trueline.rewards.combined import CombinedReward
from trueline.rollout.engine import SamplingParams
from trueline.rollout.episode import Episodes
from trueline.rollout.groups import SamplerSpec
from trueline.rollout.pool import EnginePool, RolloutKey
from trueline.rollout.session import EpisodeLimits
from trueline.runs.rollout_workers import GroupWorker, RolloutWorkers
from trueline.runtime.actors import Placement, RayActor, Target
from trueline.runtime.cluster import machine_at_hand, ray_cluster

TEMPLATE = """{%- if tools %}{{ '<s>system\\n' + (messages[0].content if messages[0].role == 'system' else 'Help.') }}
{{- '\\n\\n# Tools\\n\\nThe functions are in <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\n\\nFor each call:\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call></s>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<s>system\\n' + messages[0].content + '</s>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<s>' + message.role + '\\n' + message.content + '</s>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<s>assistant' }}
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' + (tool_call.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '</s>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<s>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '</s>\\n' }}{% endif %}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"""
TOOL = """
import asyncio, time

SECONDS = {seconds}
TEXT = "It is sunny in the town, and dry in the hills behind it. " * 3

async def patient(town: str, days: int) -> str:
    '''Tell the weather.

    Args:
        town: Which town.
        days: How many days.
    '''
    await asyncio.sleep(SECONDS)
    return f"{{town}}: {{TEXT}}"

def blocking(town: str, days: int) -> str:
    '''Tell the weather.

    Args:
        town: Which town.
        days: How many days.
    '''
    time.sleep(SECONDS)
    return f"{{town}}: {{TEXT}}"
"""
CALL = (
    'I look it up.\n<tool_call>\n{{"name": "{name}", "arguments": {{"town": "Town {turn}", "days": 3}}}}\n</tool_call>'
)
HERE = Path(__file__).resolve().parent
ANSWER = "It will be sunny."
ASKED = [{"role": "system", "content": "Be brief."}]
QUESTION, GROUP = "How will the weather be in week {}?", 8  # that many episodes have the same prompt


class MadeUp:
    """Takes the place of an engine: calls the tool in every turn but the last."""

    def __init__(self, chat: ChatFormat, tool: str, turns: int) -> None:
        calls = [chat.completion_tokens(CALL.format(name=tool, turn=turn)) for turn in range(turns - 1)]
        self.replies = [*calls, chat.completion_tokens(ANSWER)]

    async def call(self, method: Any, tokens: Any, params: SamplingParams, request: str, shown: None) -> Completion:
        await asyncio.sleep(0)
        reply = self.replies[int(request.rpartition("-")[2])]
        return Completion.of(reply, [-0.5] * len(reply), 0, "stop")


class Bench:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        name = "blocking" if given.blocking else "patient"
        (folder / "tool.py").write_text(TOOL.format(seconds=given.seconds))
        tokenizer = make_tokenizer()
        tokenizer.chat_template = TEMPLATE
        chat = ChatFormat(tokenizer, use_template=True)
        places = -(-given.episodes // given.processes)
        tools = [f"{folder}/tool.py:{name}"]
        config = EnvironmentConfig(tools=tools, processes=given.processes, episodes_per_process=places)
        self.tools = check_environment(config).tools
        self.environment = OpenEnvironment(config, CombinedReward({}, 0.0), chat, folder)
        engine: Any = MadeUp(chat, name, given.turns)
        context = 500 * (given.turns + 4)
        self.episodes = Episodes(EnginePool([engine]), chat, EpisodeLimits(context, given.turns))
        self.params = SamplingParams(1.0, context, tuple(chat.stop_ids))
        self.turns = given.turns

    def prompt(self, group: int) -> Prompt:
        return Prompt(0, [*ASKED, {"role": "user", "content": QUESTION.format(group)}], tools=self.tools)

    async def play(self, number: int) -> None:
        key = RolloutKey(number, 0, None)
        ended = await self.episodes.run(self.environment(), self.prompt(number // GROUP), key, self.params)
        if ended.outcome.is_failure or ended.metrics["episode/turns"] != self.turns or ended.branches:
            raise RuntimeError(f"{ended.outcome}, {ended.metrics}: {ended.error}")

    async def measure(self, episodes: int, processes: int) -> dict[str, float]:
        await self.environment.start()
        await asyncio.gather(*(self.play(number) for number in range(processes)))  # which starts all processes
        begun, own, theirs = time.perf_counter(), time.process_time(), seconds_of_children()
        await asyncio.gather(*(self.play(number) for number in range(episodes)))
        turns, seconds = episodes * self.turns, time.perf_counter() - begun
        spent = {"episodes": time.process_time() - own, "tools": seconds_of_children() - theirs}
        await self.environment.stop()
        found = {f"milliseconds_per_turn/{name}": 1000 * value / turns for name, value in spent.items()}
        return {"episodes_per_second": episodes / seconds, **found}


class PlayingWorker(GroupWorker):
    """A rollout worker with a share of the tools' processes."""

    def __init__(self, given: argparse.Namespace, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        bench = Bench(given, Path(folder))
        super().__init__(bench.episodes, bench.environment)


async def measure_workers(given: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Let rollout workers play all episodes at once."""
    bench = Bench(given, folder)
    share = argparse.Namespace(**vars(given) | {"processes": max(given.processes // given.workers, 1)})
    target: Target[GroupWorker] = Target("tool_turns:PlayingWorker", True, (GroupWorker.sample.__name__,))
    spot = Placement(environment={"PYTHONPATH": os.pathsep.join(map(str, [HERE, HERE.parent])), "OMP_NUM_THREADS": "1"})
    names = [f"rollouts-{number}" for number in range(given.workers)]
    logs = [folder / f"{name}.log" for name in names]
    actors = [
        RayActor(name, target, [share, str(folder / name)], spot, log) for name, log in zip(names, logs, strict=True)
    ]
    workers = RolloutWorkers(actors, EnginePool([]))
    await workers.start()
    spec = SamplerSpec(bench.params, GROUP, None, "train")

    async def play(groups: range) -> None:
        played = await asyncio.gather(*(workers.sample(spec, (at, bench.prompt(at)), at) for at in groups))
        ends = [one for group in played for one in group]
        if wrong := [one for one in ends if one.outcome.is_failure or one.metrics["episode/turns"] != given.turns]:
            raise RuntimeError(f"{wrong[0].outcome}, {wrong[0].metrics}: {wrong[0].error}")

    groups = given.episodes // GROUP
    await play(range(given.workers * share.processes))  # which starts all processes
    begun, own, theirs = time.perf_counter(), time.process_time(), seconds_of_children()
    await play(range(groups))
    seconds, turns = time.perf_counter() - begun, groups * GROUP * given.turns
    spent = {"driver": time.process_time() - own, "workers_and_tools": seconds_of_children() - theirs}
    found = {f"milliseconds_per_turn/{name}": 1000 * value / turns for name, value in spent.items()}
    return {"episodes_per_second": groups * GROUP / seconds, **found}


def seconds_of_children() -> float:
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(one.user + one.system for one in times)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--blocking", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.workers:
            with ray_cluster(machine_at_hand()):
                found = asyncio.run(measure_workers(given, Path(folder)))
        else:
            found = asyncio.run(Bench(given, Path(folder)).measure(given.episodes, given.processes))
    print(found)
    write_result(given.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
