"""What a step costs the run's own process, with real Ray, engines that return made-up tokens at once, and no model.

    python benchmarks/controller.py FOLDER [--completions 1024] [--tokens 32768] [--group 8] [--steps 4] [--workers 1]
        [--ranks 2] [--out FILE] [key=value ...]

The loop, the rollout workers and the samples by reference are those of runs. A rank reads its samples as it would for a
pass, and computes nothing. Prints for each step, in the run's own process: the processor time of its threads (the loop,
the event loop "rollouts", and threads that the loop starts for calls; not those of Ray), the growth of its memory
without what it shares with other processes. The last lines have the largest of the steps from the second on, and what
the object store holds at the end of the first step and of the run. Further arguments are keys of the run.
"""

import json
import threading
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from random_model import make_model, make_parser, make_prompts, read_steps, run_words, write_result
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from trueline.cli import main as trueline
from trueline.data.batching import FILLER, MicroBatch, SampleReader, collate
from trueline.data.pictures import Shown
from trueline.data.types import Completion
from trueline.rl import build
from trueline.rl.trainer import RLTrainer
from trueline.rollout.engine import EngineSpec, RequestBook, RolloutEngine, SamplingParams
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.summary import SampledGroup
from trueline.runs import processes
from trueline.runs.interrupts import Interrupts
from trueline.runs.state import RLState
from trueline.runtime.actors import Target
from trueline.runtime.transport import Address, Bucket, TensorSpec
from trueline.training.report import LossSettings, Report
from trueline.training.samples import StoredSamples
from trueline.training.worker import Worker

ENGINE = "hf"  # the row whose class is exchanged: other processes know it too
WORDS = (10, 250)  # tokens that are made up
SAMPLING_SECONDS, DELETING_SECONDS, MOST_LEFT = 0.02, 20.0, 0.1  # MiB
TASKS, STATUS = Path("/proc/self/task"), Path("/proc/self/status")


class MadeUpEngine(RolloutEngine):
    def __init__(self, spec: EngineSpec) -> None:
        self.book, self.random, self.version = RequestBook(self.generate), np.random.default_rng(spec.seed), 0
        self.tokens = self.random.integers(*WORDS, 2**20 + spec.context)
        self.logprobs = -self.random.random(len(self.tokens), np.float32)

    async def generate(
        self, tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
    ) -> Completion:
        first, count = int(self.random.integers(2**20)), params.max_new_tokens
        part = slice(first, first + count)
        return Completion(self.tokens[part], self.logprobs[part], np.full(count, self.version, np.int32), "stop")

    async def receive(self, buckets: list[Bucket], version: int) -> list[list[int]]:
        self.version = version
        return [[0 for _ in buckets]]


class MadeUpRank(Worker):
    def start(self, address: Address) -> None:
        pass

    def read(self, packed: SampleReader, passes: list[MicroBatch]) -> np.ndarray:
        """Read every pass, and return a number for each token."""
        lengths = []
        for micro_batch in passes:
            batch = collate(packed, micro_batch, self.device)
            pairs = zip(micro_batch, batch.lengths, strict=True)
            lengths += [length for at, length in pairs if at != FILLER]
        return np.full(sum(lengths), -1.0, np.float32)

    def score(
        self,
        packed: SampleReader,
        passes: list[MicroBatch],
        temperature: float,
        reference: bool = False,
        entropy: bool = False,
    ) -> np.ndarray:
        return self.read(packed, passes)

    def update(self, packed: SampleReader, passes: list[MicroBatch], loss: str, settings: LossSettings) -> Report:
        found, step = self.read(packed, passes), {"grad_norm": 0.0, "learning_rate": 0.0, "skipped": 0.0}
        return Report({"loss": 0.0, "weight": 1.0}, {}, step | {"memory/peak_gib": 0.0}, found, found)

    def fingerprints(self) -> dict[str, int]:
        return {}

    def weight_sample(self, most: int) -> np.ndarray:
        return np.ones(1)

    def weight_specs(self, dtype: str) -> list[TensorSpec]:
        return [TensorSpec("weight", (1,), dtype)]

    def connect(self, link: Any) -> str:
        return ""

    def send_weights(self, buckets: list[Bucket]) -> list[int]:
        return [0 for _ in buckets]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one step, in the run's own process."""

    loop: float  # seconds of the thread that runs `RLTrainer.step`
    rollouts: float  # of the event loop
    calls: float  # of threads that the step started and that ended with it
    others: float  # of all other threads: Ray's, heartbeats
    grown_mib: float  # largest memory in the step, less that before it; without shared memory
    seconds: float

    @property
    def busy(self) -> float:
        return self.loop + self.rollouts + self.calls


def thread_seconds() -> dict[int, float]:
    """Return the processor time of all threads of this process."""
    found = {}
    for task in TASKS.iterdir():
        with suppress(OSError):  # it has just ended
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def own_mib() -> float:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def stored_mib() -> float:
    """Return what the object store holds, Ray's garbage collection included."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    used: int = get_memory_info_reply(state).store_stats.object_store_bytes_used
    return used / 2**20


class MemoryPeak:
    """The largest memory of this process while it is open."""

    def __enter__(self) -> "MemoryPeak":
        self.before = self.largest = own_mib()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.follow)
        self.thread.start()
        return self

    def follow(self) -> None:
        while not self.ended.wait(SAMPLING_SECONDS):
            self.largest = max(self.largest, own_mib())

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


COSTS: list[Cost] = []
STORED: list[float] = []  # MiB in the object store at the end of the first step, and of the run


class MeasuredTrainer(RLTrainer):
    def fit(self) -> RLState:
        """Train, and wait until Ray has deleted what nobody holds any more; it does so about once a second."""
        state, until = super().fit(), time.monotonic() + DELETING_SECONDS
        while (left := stored_mib()) > MOST_LEFT and time.monotonic() < until:
            time.sleep(0.2)
        STORED.append(left)
        return state

    def clocks(self) -> np.ndarray:
        """Return the seconds of the wall, of this process, of this thread and of the event loop."""
        loop = time.pthread_getcpuclockid(self.rollouts.loop.thread.ident or 0)
        return np.array([time.perf_counter(), time.process_time(), time.thread_time(), time.clock_gettime(loop)])

    def step(self, interrupts: Interrupts) -> None:
        own = {threading.get_native_id(), self.rollouts.loop.thread.native_id}
        with MemoryPeak() as memory:
            threads, clocks = thread_seconds(), self.clocks()
            super().step(interrupts)
            ended = self.clocks()
            lasting = {thread: spent - threads.get(thread, 0.0) for thread, spent in thread_seconds().items()}
        seconds, whole, main, loop = (ended - clocks).tolist()
        others = sum(spent for thread, spent in lasting.items() if thread not in own)
        calls = max(whole - main - loop - others, 0.0)
        COSTS.append(Cost(main, loop, calls, others, memory.largest - memory.before, seconds))

    def report(self, metrics: dict[str, float], groups: list[SampledGroup], samples: StoredSamples) -> None:
        if not COSTS:  # the first step is measured, but does not count
            STORED.append(stored_mib())
        super().report(metrics, groups, samples)


def exchange_classes() -> None:
    """Let a run start the classes of this file as its engines and ranks."""
    ROLLOUT_ENGINES[ENGINE] = replace(ROLLOUT_ENGINES[ENGINE], path="controller:MadeUpEngine")
    for module in (build, processes):
        vars(module)["worker_target"] = lambda ranks: Target("controller:MadeUpRank")
    vars(build)["RLTrainer"] = MeasuredTrainer


def run(folder: Path, given: Namespace, overrides: list[str]) -> None:
    words = [*run_words(folder, given.steps), "checkpoint.save=false", "sync.check=false", f"rollout.engine={ENGINE}"]
    words += [f"prompts_per_step={given.completions // given.group}", f"algorithm.group_size={given.group}"]
    words += [f"rollout.max_new_tokens={given.tokens}", f"rollout.workers={given.workers}"]
    words += [f"training.ranks={given.ranks}", f"training.micro_batch_tokens={given.tokens + 1024}"]
    if trueline(["grpo", *words, *overrides]):
        raise SystemExit("the run failed")


def make_material(folder: Path, tokens: int) -> None:
    folder.mkdir(parents=True)
    make_model(folder / "model", "tiny")
    make_prompts(folder)
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": tokens + 1024}))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    for option, default in {"completions": 1024, "tokens": 32768, "group": 8, "steps": 4, "workers": 1}.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given, overrides = parser.parse_known_args()
    folder = given.folder.resolve()
    make_material(folder, given.tokens)
    exchange_classes()
    run(folder, given, overrides)
    for number, (cost, row) in enumerate(zip(COSTS, read_steps(folder / "run"), strict=True), 1):
        parts = f"loop {cost.loop:.3f}, rollouts {cost.rollouts:.3f}, calls {cost.calls:.3f}; others {cost.others:.3f}"
        memory = f"memory +{cost.grown_mib:.1f} MiB"
        names = ("rollout", "score", "train", "sync")
        phases = ", ".join(f"{name} {row[f'time/{name}']:.2f}" for name in names if f"time/{name}" in row)
        print(f"step {number}: busy {cost.busy:.3f} s ({parts}), {memory}, step {cost.seconds:.2f} s ({phases})")
    rest = COSTS[1:] or COSTS
    worst = {"busy": max(one.busy for one in rest), "grown_mib": max(one.grown_mib for one in rest)}
    print(f"largest: busy {worst['busy']:.3f} s, memory +{worst['grown_mib']:.1f} MiB")
    print(f"object store: {STORED[0]:.1f} MiB with the samples of a step, {STORED[-1]:.1f} MiB at the end")
    if STORED[-1] > MOST_LEFT:
        raise SystemExit("something still holds samples of a step that is over")
    write_result(given.out, worst | {"stored_mib": STORED, "steps": [asdict(one) for one in COSTS]})


if __name__ == "__main__":
    main()
