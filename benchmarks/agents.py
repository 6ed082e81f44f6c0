"""Episodes per second with slow tools: each continues when its own tool returns, or all wait for all in every turn.

    python benchmarks/agents.py FOLDER [--episodes 256] [--turns 8] [--engine vllm] [--out FILE]

One engine behind Ray, a small random model, replies of four tokens. The environment is a user's class in processes of
its own: a step takes 0.2 s, one in twenty 5 s. In the first run `--episodes` are in flight at any time, and a new one
begins when one ends (continuous admission); counting starts when that many have ended and stops after twice as many
more. In the second run episodes take their turns in lockstep, batch after batch.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from random_model import make_model, make_parser, write_result

from trueline.config.environment import EnvironmentConfig
from trueline.config.model import ModelConfig
from trueline.config.rl import RolloutConfig
from trueline.data.types import Prompt
from trueline.environments.base import Environment, EpisodeResult, Policy
from trueline.environments.multi_turn import StepEnvironment
from trueline.environments.opening import user_code_of
from trueline.models.loading import load_chat
from trueline.rewards.combined import CombinedReward
from trueline.rollout.engine import EngineSpec, RolloutEngine, SamplingParams
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.episode import Episodes
from trueline.rollout.pool import EnginePool, RolloutKey
from trueline.rollout.session import EpisodeLimits
from trueline.runtime.cluster import machine_at_hand, ray_cluster
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.placement import Layout, Processes
from trueline.usercode.host import EpisodeHosts

GAME = """
import random, time

class Slow:
    def __init__(self, turns):
        self.left = turns
    def reset(self, prompt):
        return None
    def step(self, reply):
        time.sleep(5.0 if random.random() < 0.05 else 0.2)
        self.left -= 1
        return {"messages": "and?", "reward": 0.0, "done": self.left == 0}
"""
SECONDS = 600.0
TURN_TOKENS = 4


class Lockstep(Environment):
    """A game in which nobody has a second turn before all have had their first."""

    def __init__(self, game: StepEnvironment, barrier: asyncio.Barrier) -> None:
        self.game, self.barrier = game, barrier

    async def play(self, policy: Policy, prompt: Prompt) -> EpisodeResult:
        outer = self

        class Waiting(Policy):
            add_reward, hear, talk, replies = policy.add_reward, policy.hear, policy.talk, policy.replies

            async def reply(self, *given: Any) -> Any:
                await outer.barrier.wait()
                return await policy.reply(*given)

        return await self.game.play(Waiting(), prompt)

    async def close(self) -> None:
        await self.game.close()


class Bench:
    def __init__(self, folder: Path, given: argparse.Namespace, pool: EnginePool) -> None:
        (folder / "game.py").write_text(GAME)
        config = EnvironmentConfig(function=f"{folder}/game.py:Slow", options={"turns": given.turns})
        code = user_code_of(config)
        assert code is not None
        self.hosts = EpisodeHosts(code, config.processes, folder / "environment.log")
        self.rewards = CombinedReward({}, 0.0)
        chat = load_chat(ModelConfig(path=str(folder / "model")), "never")
        self.episodes = Episodes(pool, chat, EpisodeLimits(200, given.turns, TURN_TOKENS))
        self.params = SamplingParams(1.0, 150, ())
        self.prompt = Prompt(0, [{"role": "user", "content": "begin"}])
        self.in_flight, self.number = given.episodes, 0

    async def play(self, environment: Environment) -> None:
        self.number += 1
        ended = await self.episodes.run(environment, self.prompt, RolloutKey(self.number, 0, None), self.params)
        if ended.outcome.is_failure:
            raise RuntimeError(ended.error)

    def game(self) -> StepEnvironment:
        return StepEnvironment(self.hosts, self.rewards)

    async def continuous(self) -> float:
        running = {asyncio.create_task(self.play(self.game())) for _ in range(self.in_flight)}
        ends: list[float] = []
        while len(ends) < 3 * self.in_flight:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ends += [time.perf_counter()] * len(done)
            for task in done:
                task.result()
            running |= {asyncio.create_task(self.play(self.game())) for _ in done}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        first, last = ends[self.in_flight - 1], ends[3 * self.in_flight - 1]
        return 2 * self.in_flight / (last - first)

    async def lockstep(self) -> float:
        begun, barrier = time.perf_counter(), asyncio.Barrier(self.in_flight)
        await asyncio.gather(*(self.play(Lockstep(self.game(), barrier)) for _ in range(self.in_flight)))
        return self.in_flight / (time.perf_counter() - begun)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.folder.resolve()
    make_model(folder / "model", "small")
    machine, loop = machine_at_hand(), EventLoop(SECONDS)
    dtype = "bfloat16" if machine.gpus else "float32"
    spec = EngineSpec(f"{folder}/model", dtype, 200, 1, given.episodes, 0, 0.5, True, False, False)
    with ray_cluster(machine):
        processes = Processes(machine, Layout(0, 1), folder / "logs", local=False)
        pool = EnginePool(processes.engines(ROLLOUT_ENGINES[given.engine].target(RolloutConfig()), [spec]))
        loop.run(pool.call(RolloutEngine.processes), "start of the engine")
        bench = Bench(folder, given, pool)
        loop.run(bench.lockstep(), "warming up")
        found = {"continuous": loop.run(bench.continuous(), "continuous"), "lockstep": loop.run(bench.lockstep(), "2")}
        loop.run(bench.hosts.stop(), "stopping")
        pool.stop()
    loop.stop()
    found["ratio"] = found["continuous"] / found["lockstep"]
    print(found)
    write_result(given.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
