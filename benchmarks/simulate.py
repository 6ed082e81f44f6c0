"""A cluster in virtual time: the real admission, pool, staleness and ledger, with engines that only take their time.

    python benchmarks/simulate.py [--engines 1000] [--episodes 100000] [--staleness 0 1 2 4] [--turns 1] [...]
    python benchmarks/simulate.py --measured benchmarks/results/asynchrony_cpu.json

`Rollouts`, `GroupSampler`, `EnginePool` and `Ledger` are the ones that runs use; they run in an event loop whose clock
jumps to the next event. Engines, tools and the trainer are simulated: a step of an engine takes longer with more
sequences (by default as measured on an H200, `STEPS`), lengths of completions are drawn, and engines may die. At every
event the invariants of a run are checked. Prints for each bound of staleness and each way of updating: samples per
second, the share of time in which engines decode, the mean number of sequences in an engine, and the mean staleness.

With --measured, the synchronous runs of `benchmarks/asynchrony.py` give the seconds of a token and of an update, and
the asynchronous ones are predicted from them.
"""

import argparse
import asyncio
import heapq
import json
import math
import selectors
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import numpy as np
from random_model import make_parser, write_result

from trueline.data.loader import Order
from trueline.data.pictures import Shown
from trueline.data.types import INTERRUPTED, Completion, Prompt, Trajectory
from trueline.environments.base import Environment
from trueline.monitoring.ledger import Ledger
from trueline.rollout.engine import RolloutEngine, SamplingParams
from trueline.rollout.failures import EngineLost, FailureBudget
from trueline.rollout.groups import Group, GroupSampler, SamplerSpec
from trueline.rollout.pool import EnginePool, RolloutKey
from trueline.rollout.rollouts import RolloutPlan, Rollouts
from trueline.runtime.actors import ActorDeath, RayActor

# Seconds of a decoding step by the number of sequences: a 1.5B shape with log-probs, vLLM 0.26, H200. The last
# pair is assumed, on the line of the two before.
STEPS = ((1, 0.0024), (32, 0.0030), (128, 0.0055), (512, 0.0155))
PREFILL = 60_000.0  # tokens of prompts in a second, assumed
PATIENCE = 1e9  # virtual seconds without a group after which nothing will ever happen
PROMPT = [{"role": "user", "content": "?"}]
WAYS = ("wait", "interrupt", "keep")
MEASURED_BATCH = (4, 4)  # prompts of a step and completions of a prompt in benchmarks/asynchrony.py
MEASURED_TOKENS, SHORTEST, SHAPE = 600, 20, 1.0  # and its lengths: Pareto's distribution, cut off


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(JumpingSelector(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        done = self.create_future()
        done.set_result(func(*args))
        return done


class JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is left that could happen")
        self.loop.now += max(timeout, 0.0)
        return []


class Clock:
    """What `Rollouts` expects of the loop of a synchronous controller; the virtual time passes only inside `run`."""

    def __init__(self) -> None:
        self.loop, self.timeout_seconds = VirtualLoop(), PATIENCE
        asyncio.set_event_loop(self.loop)

    def run(self, work: Coroutine[Any, Any, Any], what: str = "") -> Any:
        return self.loop.run_until_complete(work)

    run_until_interrupted = run


@dataclass(frozen=True, slots=True)
class Speed:
    """How long engines and the trainer take."""

    steps: tuple[tuple[int, float], ...] = STEPS  # seconds of a decoding step, by the number of sequences
    prefill: float = PREFILL  # tokens in a second
    train: float = 2.2  # seconds of a step's training
    sync: float = 0.41
    start: float = 60.0  # of an engine that died

    def step_seconds(self, sequences: int) -> float:
        sizes, seconds = zip(*self.steps, strict=True)
        return float(np.interp(sequences, sizes, seconds))


@dataclass(frozen=True, slots=True)
class Load:
    """What a run samples."""

    prompts_per_step: int
    group_size: int
    max_new_tokens: int
    length: Callable[[str, int], int]  # tokens of a request, by its name and the most that it may have
    prompt_tokens: int = 256
    turns: int = 1
    tool_seconds: float = 0.0
    engine_failures: float = 0.0  # of one engine in an hour


@dataclass(order=True, slots=True)
class Decoding:
    """A sequence in an engine: it ends when the engine has made `target` steps."""

    target: float
    number: int
    start: float = field(compare=False)
    sampled: "asyncio.Future[bool]" = field(compare=False)  # whether it came to its end
    pieces: list[tuple[int, int]] = field(compare=False, default_factory=list)  # tokens of each version so far

    def close_piece(self, steps: float, version: int) -> None:
        made = math.floor(min(steps, self.target) - self.start + 1e-6)
        self.pieces.append((made - sum(tokens for tokens, _ in self.pieces), version))


class SimulatedEngine(RayActor[RolloutEngine]):
    """An engine whose sequences share its steps. Its calls are those that a pool and a weight sync make."""

    def __init__(self, name: str, clock: Clock, speed: Speed, load: Load, max_sequences: int) -> None:
        self.name, self.clock, self.speed, self.load, self.most = name, clock, speed, load, max_sequences
        self.seconds = [speed.step_seconds(sequences) for sequences in range(max_sequences + 1)]
        self.numbers, self.version, self.life = count(), 0, 0
        self.busy = self.sequence_seconds = 0.0
        self.start()

    def start(self) -> None:
        self.life += 1
        self.death: ActorDeath | None = None
        self.decoding: list[Decoding] = []
        self.steps, self.since, self.inside = 0.0, self.clock.loop.time(), 0
        self.slots, self.is_frozen = asyncio.Semaphore(self.most), False
        self.resumed, self.empty = asyncio.Event(), asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None
        self.resumed.set()
        self.empty.set()

    # What a pool does with an actor

    def begin(self) -> None:
        self.start()
        self.ready_at = self.clock.loop.time() + self.speed.start

    def kill(self) -> None:
        self.die("was ended")

    def has_lost_node(self) -> bool:
        return False

    def ping(self) -> Any:
        return self

    async def async_result(self) -> None:
        """Answer a ping."""
        self.check_alive(self.life)

    async def call(self, method: Any, *args: Any, **named: Any) -> Any:
        life = self.life
        found = await getattr(self, method.__name__)(*args, **named)
        self.check_alive(life)
        return found

    def check_alive(self, life: int) -> None:
        if self.death is not None or self.life != life:
            raise self.death or ActorDeath(f"{self.name} was started again", "was started again")

    def die(self, why: str) -> None:
        self.death = ActorDeath(f"{self.name} {why}", why)
        ended, self.decoding = self.decoding, []
        for one in ended:
            one.sampled.set_exception(self.death)
            one.sampled.exception()  # its caller may be gone
        self.resumed.set()
        self.empty.set()

    # What an engine does

    async def processes(self) -> int:
        await asyncio.sleep(max(self.ready_at - self.clock.loop.time(), 0.0))
        return 1

    async def generate(
        self, tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
    ) -> Completion:
        before = self.load.max_new_tokens - params.max_new_tokens  # of a completion that goes on
        length = max(self.load.length(request.partition(".")[0], self.load.max_new_tokens) - before, 1)
        life = self.life
        while not self.resumed.is_set():
            await self.resumed.wait()
        self.inside += 1
        self.empty.clear()
        try:
            async with self.slots:
                await asyncio.sleep(len(tokens) / self.speed.prefill)
                while self.is_frozen:
                    await self.resumed.wait()
                self.check_alive(life)
                return await self._decode(length)
        finally:
            if self.life == life:
                self.inside -= 1
                if not self.inside:
                    self.empty.set()

    async def _decode(self, length: int) -> Completion:
        self._advance()
        one = Decoding(self.steps + length, next(self.numbers), self.steps, self.clock.loop.create_future())
        heapq.heappush(self.decoding, one)
        self._plan()
        try:
            is_whole = await one.sampled
        except asyncio.CancelledError:
            self.decoding = [other for other in self.decoding if other is not one]
            heapq.heapify(self.decoding)
            raise
        versions = np.concatenate([np.full(tokens, version, np.int32) for tokens, version in one.pieces])
        zeros = np.zeros(len(versions), np.int64)
        return Completion(zeros, zeros, versions, "stop" if is_whole else INTERRUPTED)

    def _advance(self) -> None:
        """Count the steps that were made since the last event."""
        now, sequences = self.clock.loop.time(), len(self.decoding)
        if sequences and not self.is_frozen:
            self.steps += (now - self.since) / self.seconds[sequences]
            self.busy += now - self.since
            self.sequence_seconds += (now - self.since) * sequences
        self.since = now

    def _plan(self) -> None:
        """Set the timer for the next sequence that ends."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.decoding and not self.is_frozen:
            left = max(self.decoding[0].target - self.steps, 0.0) * self.seconds[len(self.decoding)]
            self.timer = self.clock.loop.call_later(left, self._finish)

    def _finish(self) -> None:
        self._advance()
        while self.decoding and self.decoding[0].target <= self.steps + 1e-6:
            one = heapq.heappop(self.decoding)
            one.close_piece(one.target, self.version)
            one.sampled.set_result(True)
        self._plan()

    async def pause(self, mode: str = "wait") -> None:
        self.resumed.clear()
        if mode == "wait":
            await self.empty.wait()
            return
        self._advance()
        for one in self.decoding:
            one.close_piece(self.steps, self.version)
        if mode == "keep":
            self.is_frozen = True
        else:
            ended, self.decoding = self.decoding, []
            for one in ended:
                one.sampled.set_result(False)
        self._plan()

    async def resume(self) -> None:
        self._advance()
        self.is_frozen = False
        self.resumed.set()
        self._plan()


class Nobody(Environment):
    async def play(self, policy: Any, prompt: Prompt) -> Any:
        raise AssertionError("simulated episodes have no environment")


class SimulatedEpisodes:
    """Episodes without texts: turns of the policy, and a tool that takes its time after each but the last."""

    def __init__(self, pool: EnginePool, load: Load, check: Callable[[], None]) -> None:
        self.pool, self.load, self.check = pool, load, check
        self.prompt = [0] * load.prompt_tokens

    async def run(
        self, environment: Environment, prompt: Prompt, key: RolloutKey, params: SamplingParams
    ) -> Trajectory:
        trajectory, tokens = Trajectory(prompt, key.group), list(self.prompt)
        with self.pool.keep_group(key.group):
            for turn in range(self.load.turns):
                self.check()
                completion = await self.pool.generate(tokens, params, key, turn)
                trajectory.add_action(completion)
                tokens = tokens + completion.tokens.tolist()
                if turn + 1 < self.load.turns:
                    await asyncio.sleep(self.load.tool_seconds)
        self.check()
        trajectory.add_reward(float(key.index % 2))
        return trajectory


@dataclass(frozen=True, slots=True)
class Setting:
    """How a run is set up."""

    engines: int = 1
    max_sequences: int = 256
    staleness: int = 0
    on_update: str = "wait"


class BrokenInvariant(RuntimeError):
    """The scheduler has done what it must never do."""


class Simulation:
    """A run: it does what `RLTrainer.step` does, with a trainer and a sync that only take their time."""

    def __init__(self, load: Load, speed: Speed, setting: Setting) -> None:
        self.load, self.speed, self.setting = load, speed, setting
        self.clock, self.ledger, self.version = Clock(), Ledger(), 0
        names = (f"engine-{number}" for number in range(setting.engines))
        self.engines = [SimulatedEngine(name, self.clock, speed, load, setting.max_sequences) for name in names]
        self.pool = EnginePool(self.engines, setting.max_sequences)
        self.pool.is_supervised = True
        self.trained: set[int] = set()
        self.plan = RolloutPlan(load.prompts_per_step, setting.staleness)
        params = SamplingParams(1.0, load.max_new_tokens, ())
        episodes: Any = SimulatedEpisodes(self.pool, load, self.check)
        clock: Any = self.clock
        self.rollouts = Rollouts(
            GroupSampler(episodes, Nobody, SamplerSpec(params, load.group_size, None, "train")),
            [Prompt(0, PROMPT)],
            Order(1, seed=0, shuffle=False, position=0),
            self.plan,
            FailureBudget(1.0, load.prompts_per_step * load.group_size),
            clock,
            self.ledger,
        )

    def check(self) -> None:
        fates, under_way = sum(self.ledger.fates.values()), len(self.ledger.under_way)
        if self.ledger.drawn != fates + under_way:
            raise BrokenInvariant(self.ledger.balance())
        if len(self.rollouts.running) > self.plan.capacity():
            raise BrokenInvariant(f"{len(self.rollouts.running)} groups in flight, {self.plan.capacity()} may be")

    def check_groups(self, groups: list[Group]) -> float:
        """Check what a step trains on, and return its mean staleness."""
        numbers = {group[0].group for group in groups}
        if len(groups) != self.load.prompts_per_step or numbers & self.trained:
            raise BrokenInvariant(f"{len(groups)} groups, of which {len(numbers & self.trained)} were trained before")
        self.trained |= numbers
        lags = [self.version - one.oldest_version() for group in groups for one in group]
        if max(lags) > self.setting.staleness or min(lags) < 0:
            bound = self.setting.staleness
            raise BrokenInvariant(f"tokens lag {min(lags)} to {max(lags)} versions, {bound} are allowed")
        return fmean(lags)

    def run(self, steps: int) -> list[dict[str, float]]:
        """Return time and staleness of each step."""
        if self.load.engine_failures:
            self.clock.loop.create_task(self.break_engines())
        self.publish()
        self.rollouts.start(self.version)
        found = []
        for _ in range(steps):
            begun = self.clock.loop.time()
            groups = self.sample()
            lag = self.check_groups(groups)
            self.clock.run(asyncio.sleep(self.speed.train))
            self.ledger.close([group[0].group for group in groups], "trained")
            self.version += 1
            self.publish()
            self.rollouts.release(self.version)
            found.append({"seconds": self.clock.loop.time() - begun, "staleness": lag})
        return found

    def sample(self) -> list[Group]:
        while True:
            try:
                return self.rollouts.take(self.load.prompts_per_step)
            except EngineLost:
                self.publish()

    def publish(self) -> None:
        while True:
            while self.pool.missing():
                self.clock.run(self.pool.restart(PATIENCE))
            try:
                self.clock.run(self.pool.call(RolloutEngine.pause, self.setting.on_update))
                self.clock.run(asyncio.sleep(self.speed.sync))
                for engine in self.engines:
                    engine.version = self.version
                self.clock.run(self.pool.call(RolloutEngine.resume))
            except ActorDeath:
                self.clock.run(self.pool.abandon_update(PATIENCE))
            else:
                break
        self.clock.run(self.pool.readmit())

    async def break_engines(self) -> None:
        """End engines at random; as in a run, the pool notices by the calls that fail."""
        random = Random(0)
        while True:
            await asyncio.sleep(random.expovariate(self.load.engine_failures * len(self.engines) / 3600))
            random.choice(self.engines).die(f"died ({random.getrandbits(32)})")

    def close(self) -> None:
        left = [*asyncio.all_tasks(self.clock.loop), *(one.task for one in self.rollouts.running.values())]
        for task in left:
            task.cancel()
        self.clock.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.clock.loop.close()


def heavy_tailed(shortest: float, shape: float) -> Callable[[str, int], int]:
    """Return lengths by Pareto's distribution; a request always has the same one."""

    def length(request: str, most: int) -> int:
        return min(int(shortest * Random(request).paretovariate(shape)), most)

    return length


def lognormal(mean: float, deviation: float) -> Callable[[str, int], int]:
    scale = math.log(mean) - deviation**2 / 2

    def length(request: str, most: int) -> int:
        return max(min(int(Random(request).lognormvariate(scale, deviation)), most), 1)

    return length


def simulate(load: Load, speed: Speed, setting: Setting, steps: int, warm: int) -> dict[str, float]:
    """Return what a run does on average, but for its first steps."""
    begun = time.perf_counter()
    run = Simulation(load, speed, setting)
    try:
        found = run.run(steps)
        run.ledger.balance()  # which refuses a sum that does not match
    finally:
        run.close()
    seconds, total = sum(one["seconds"] for one in found[warm:]), run.clock.loop.time()
    busy = sum(engine.busy for engine in run.engines)
    return {
        "samples_per_second": load.prompts_per_step * load.group_size * len(found[warm:]) / seconds,
        "step_seconds": seconds / len(found[warm:]),
        "decoding_share": busy / total / setting.engines,
        "sequences": sum(engine.sequence_seconds for engine in run.engines) / busy,
        "staleness": fmean(one["staleness"] for one in found[warm:]),
        "engine_starts": float(sum(engine.life for engine in run.engines) - setting.engines),
        "episodes": float(run.ledger.drawn * load.group_size),
        "computed_in": time.perf_counter() - begun,
    }


def calibrate(runs: list[dict[str, Any]]) -> tuple[Speed, Load]:
    """Return how long synchronous runs of benchmarks/asynchrony.py take for what, and what they sample.

    A rollout has as many decoding steps as its longest completion has tokens, and each takes longer with more
    sequences: the rollouts and the known lengths give the seconds of a step and of each sequence in it.
    """
    prompts, size = MEASURED_BATCH
    load = Load(prompts, size, MEASURED_TOKENS, heavy_tailed(SHORTEST, SHAPE), prompt_tokens=0)
    steps = range(int(runs[0]["warm"]), int(runs[0]["steps"]))
    groups = [range(step * prompts, (step + 1) * prompts) for step in steps]
    keys = [[RolloutKey(group, index) for group in some for index in range(size)] for some in groups]
    lengths = [[load.length(key.request(0), MEASURED_TOKENS) for key in some] for some in keys]
    rollouts = [run["rollouts"][step] for run in runs for step in steps]
    counts = np.array([[max(some), sum(some)] for some in lengths] * len(runs), float)
    base, each = map(float, np.linalg.lstsq(counts, np.array(rollouts))[0])
    if each < 0:  # lost in the noise
        base, each = float(counts[:, 0] @ np.array(rollouts) / (counts[:, 0] @ counts[:, 0])), 0.0
    sync, step = (fmean(run[name] for run in runs) for name in ("sync", "step"))
    train = step - fmean(rollouts) - sync
    return Speed(tuple((count, base + count * each) for count in (0, 1000)), train=train, sync=sync), load


def predict(file: Path) -> dict[str, Any]:
    """Predict the asynchronous runs of a file from its synchronous ones."""
    measured = {mode: runs for mode, runs in json.loads(file.read_text()).items() if mode != "command"}
    speed, load = calibrate(measured["synchronous"])
    fixed = f"training {speed.train:.2f} s, sync {speed.sync:.2f} s"
    one, many = (speed.step_seconds(count) * 1000 for count in (1, 16))
    print(f"a step of 1 sequence {one:.2f} ms, of 16 {many:.2f}; {fixed}")
    found = {}
    for mode, runs in measured.items():
        staleness, _, way = mode.partition(" ")
        setting = Setting(staleness=int(staleness) if way else 0, on_update=way or "wait")
        steps, warm = int(runs[0]["steps"]), int(runs[0]["warm"])
        predicted = simulate(load, speed, setting, steps, warm)["samples_per_second"]
        seen = median(run["samples_per_second"] for run in runs)
        found[mode] = {"predicted": predicted, "measured": seen, "ratio": predicted / seen}
        print(f"{mode:<12} predicted {predicted:6.2f}, measured {seen:6.2f} samples/s ({predicted / seen:.2f})")
    return found


def table(given: argparse.Namespace) -> dict[str, Any]:
    """Simulate every bound of staleness, and every way of updating where it makes a difference."""
    load = Load(
        given.prompts,
        given.group_size,
        given.tokens,
        lognormal(given.mean_tokens, given.deviation),
        given.prompt_tokens,
        given.turns,
        given.tool_seconds,
        given.engine_failures,
    )
    speed = Speed(train=given.train_seconds, sync=given.sync_seconds)
    steps = max(math.ceil(given.episodes / given.prompts / given.group_size), 3)
    found = {}
    for staleness in given.staleness:
        for way in given.on_update if staleness else ["wait"]:
            setting = Setting(given.engines, given.max_sequences, staleness, way)
            one = found[f"{staleness} {way}"] = simulate(load, speed, setting, steps, min(2, steps - 1))
            print(
                f"max_staleness={staleness} {way:<9} {one['samples_per_second']:8.1f} samples/s, "
                f"{one['step_seconds']:.1f} s a step; engines decode {one['decoding_share']:.0%} of the time, "
                f"{one['sequences']:.0f} sequences each; staleness {one['staleness']:.2f}; "
                f"{one['engine_starts']:.0f} engines started again "
                f"({one['episodes']:.0f} episodes in {one['computed_in']:.0f} s)",
                flush=True,
            )
    return found


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--prompts", type=int, default=2048, help="of a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-sequences", type=int, default=256, help="that an engine decodes at a time")
    parser.add_argument("--tokens", type=int, default=8192, help="most of a completion")
    parser.add_argument("--mean-tokens", type=float, default=2000.0)
    parser.add_argument("--deviation", type=float, default=0.8, help="of the logarithm of lengths")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--tool-seconds", type=float, default=1.0)
    parser.add_argument("--engine-failures", type=float, default=0.0, help="of one engine in an hour")
    parser.add_argument("--train-seconds", type=float, default=10.0)
    parser.add_argument("--sync-seconds", type=float, default=2.0)
    parser.add_argument("--staleness", type=int, nargs="*", default=[0, 1, 2, 4])
    parser.add_argument("--on-update", nargs="*", default=["wait", "keep"], choices=WAYS)
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    write_result(given.out, predict(given.measured) if given.measured else table(given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
