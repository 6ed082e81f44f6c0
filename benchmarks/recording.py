"""What recording costs: who did what in a step, memory, and the numbers of each token of four transcripts.

    python benchmarks/recording.py FOLDER [--requests 1000] [--steps 10] [--prompts 4] [--tokens 64]

First, without a model: the work of a step with so many requests in flight at once, each an episode, a call and a
reward, with and without a recorder, the row that is written, and four transcripts of 512 tokens. Then one run
of GRPO in this process with a small random model: the seconds spent on recording as a share of its steps, and bytes per
1,000 steps. Files of the run stay in FOLDER.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from random_model import make_model, make_parser, make_prompts, read_steps, run_words

from trueline.cli import main as trueline
from trueline.data.pieces import Pieces
from trueline.data.types import Completion, Prompt, Sample, Trajectory, to_samples
from trueline.demo.material import make_tokenizer
from trueline.monitoring import trackers
from trueline.monitoring.events import Events
from trueline.monitoring.heartbeat import ActivityLog
from trueline.rl import step
from trueline.rl.transcripts import MOST_TOKENS, token_rows

IN_FLIGHT, ROUNDS = 256, 7


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def request(work: ActivityLog, engine: int) -> list[Any]:
    return [
        work.begin("environment", "SingleTurn", "play"),
        work.begin("call", f"engine-{engine}", "generate"),
        work.begin("reward", "reward", "math"),
    ]


def step_of(work: ActivityLog, requests: int) -> None:
    """Begin and end the work of a step, as many requests at once as engines take."""
    waiting: list[list[Any]] = []
    for number in range(requests):
        waiting.append(request(work, number % 8))
        if len(waiting) == IN_FLIGHT or number == requests - 1:
            for doing in (one for three in waiting for one in three):
                work.end(doing)
            waiting = []


def episode(pieces: Pieces) -> list[Sample]:
    """Return a sample of a reply with more tokens than are kept, as it is after an update."""
    text = "".join(chr(97 + at % 26) if at % 5 else " " for at in range(MOST_TOKENS + 88))
    tokens = pieces.tokenizer(text)["input_ids"]
    trajectory = Trajectory(Prompt(0, [{"role": "user", "content": "?"}]), 0, reward=1.0)
    trajectory.add_observation([5])
    trajectory.add_action(Completion.of(tokens, np.random.default_rng(0).normal(size=len(tokens)).tolist(), 0, "stop"))
    (sample,) = to_samples(trajectory, 0)
    sample.old_logprobs = sample.rollout_logprobs + 0.01
    sample.advantages = sample.entropy = sample.rollout_logprobs * 0.5
    return [sample]


def without_a_model(requests: int, folder: Path) -> None:
    plain, recorded = ActivityLog(), ActivityLog()
    recorder, pieces = Events(folder, recorded), Pieces(make_tokenizer())
    samples = episode(pieces)
    found: dict[str, list[float]] = {"without": [], "with": [], "row": [], "tokens": []}
    for _ in range(ROUNDS):
        found["without"].append(seconds_of(lambda: step_of(plain, requests)))
        found["with"].append(seconds_of(lambda: step_of(recorded, requests)))
        recorder.looked = 0.0  # memory is looked at in every row
        found["row"].append(seconds_of(lambda: trackers.compact(recorder.row())))
        found["tokens"].append(
            seconds_of(lambda: [trackers.compact({"": token_rows(samples, pieces)}) for _ in "1234"])
        )
    took = {name: 1000 * median(values) for name, values in found.items()}
    more = took["with"] - took["without"] + took["row"] + took["tokens"]
    print(f"{requests} requests: reporting {took['without']:.1f} ms, with recording {took['with']:.1f} ms")
    print(f"row {took['row']:.2f} ms, four transcripts of {MOST_TOKENS} tokens {took['tokens']:.1f} ms")
    print(f"all of it {more:.1f} ms: {more / 10_000:.3%} of a step of 10 s")


class Spent:
    """Counts the seconds inside functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*given)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def in_a_run(folder: Path, steps: int, prompts: int, tokens: int) -> None:
    spent = Spent()
    Events.add, Events.row = spent.wrap(Events.add), spent.wrap(Events.row)  # type: ignore[method-assign]
    step.token_rows = spent.wrap(step.token_rows)  # type: ignore[assignment]
    trackers.compact = spent.wrap(trackers.compact)  # it also writes transcripts without tokens
    make_model(folder / "model", "tiny", vocabulary=len(make_tokenizer()))
    make_prompts(folder)
    sizes = [f"prompts_per_step={prompts}", f"rollout.max_new_tokens={tokens}"]
    keys = [*sizes, "runtime=local", "checkpoint.save=false", "training.learning_rate=1e-4"]
    if trueline(["grpo", *run_words(folder, steps), *keys]):
        raise SystemExit("the run failed")
    seconds = [row["time/step"] for row in read_steps(folder / "run")]
    print(f"{steps} steps of {median(seconds):.2f} s: {1000 * spent.seconds / steps:.1f} ms of each for recording,")
    print(f"{spent.seconds / (sum(seconds) - spent.seconds):.2%} more than without")
    for name in ("events", "transcripts"):
        size = (folder / f"run/{name}.jsonl").stat().st_size
        print(f"{name}.jsonl: {size / steps / 1000:.2f} MB per 1,000 steps")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    without_a_model(given.requests, given.folder)
    in_a_run(given.folder.resolve(), given.steps, given.prompts, given.tokens)


if __name__ == "__main__":
    main()
