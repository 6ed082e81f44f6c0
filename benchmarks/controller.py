"""Seconds that the controller itself spends on a step of 1,024 completions of 8,192 tokens each, without any model.

    python benchmarks/controller.py [--completions 1024] [--tokens 8192] [--runs 5]

From completions as they come from the engines to what the trainer's ranks are sent, and the metrics. Prints medians of
the whole and of its parts on one thread. Processor time is that of this process alone; use it if other programs
run too.
"""

import argparse
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median

import numpy as np
import torch

from trueline.algorithms.advantages import assign_advantages
from trueline.algorithms.loss_aggregation import set_weights
from trueline.algorithms.reward_shaping import shape_rewards
from trueline.config.rl import RLConfig
from trueline.data.batching import Budget, plan_micro_batches
from trueline.data.types import Completion, Prompt, Trajectory, pack_samples, to_samples
from trueline.rl.metrics import describe_models, describe_step
from trueline.rollout.ledger import Ledger
from trueline.rollout.rollouts import Dropped

GROUP, PROMPT = 8, 256


def part_of(random: np.random.Generator, size: int, version: int) -> Completion:
    versions = np.full(size, version, np.int32)
    return Completion(random.integers(0, 50_000, size), -random.random(size, np.float32), versions, "stop")


class Step:
    """The controller's part of one step, in the order of `RLTrainer.step`."""

    def __init__(self, completions: int, tokens: int) -> None:
        random = np.random.default_rng(0)
        self.config = RLConfig.parse({"algorithm": {"preset": "grpo"}})
        self.tokens = tokens
        half = tokens // 2  # each completion has crossed one update
        self.arrived = [
            [pickle.dumps(part_of(random, size, version)) for size, version in ((half, 2), (tokens - half, 3))]
            for _ in range(completions)
        ]
        self.parts: dict[str, Callable[[], None]] = {
            "receive": self.receive,
            "samples": self.make_samples,
            "advantages": self.assess,
            "weights, passes, packing": self.pack,
            "metrics": self.describe,
            "ledger and versions": self.account,
        }

    def receive(self) -> None:
        prompt = list(range(PROMPT))
        self.trajectories = []
        for number, data in enumerate(self.arrived):
            trajectory = Trajectory(Prompt(number // GROUP, [{"role": "user", "content": "?"}]), number // GROUP)
            trajectory.add_observation(prompt)
            trajectory.add_action(Completion.join([pickle.loads(part) for part in data]))
            trajectory.add_reward(float(number % 3))
            self.trajectories.append(trajectory)

    def make_samples(self) -> None:
        numbered = enumerate(self.trajectories)
        self.samples = [one for number, episode in numbered for one in to_samples(episode, number)]
        for sample in self.samples:
            sample.old_logprobs = sample.rollout_logprobs

    def assess(self) -> None:
        shape_rewards(self.samples, self.config.algorithm, self.tokens, 0.0)
        assign_advantages(self.samples, self.config.algorithm)

    def pack(self) -> None:
        set_weights(self.samples, self.config.algorithm.loss_aggregation, self.tokens)
        plan_micro_batches([sample.length() for sample in self.samples], 8, Budget(16384))
        pack_samples(self.samples)

    def describe(self) -> None:
        groups = [self.trajectories[start : start + GROUP] for start in range(0, len(self.trajectories), GROUP)]
        describe_step(groups, self.samples, Dropped(), 3)
        describe_models(self.samples, self.config)

    def account(self) -> None:
        """Do by itself what the ledger and per-token versions add to the parts above."""
        ledger, groups = Ledger(), range(len(self.trajectories) // GROUP)
        ledger.close([ledger.draw(row) for row in groups], "trained")
        json.dumps(asdict(ledger) | ledger.row())
        ledger.balance()
        versions = [np.concatenate([one.versions[:-PROMPT], one.versions[-PROMPT:]]) for one in self.trajectories]
        np.concatenate([one[one >= 0] for one in versions]).mean()
        for trajectory in self.trajectories:
            trajectory.oldest_version()

    def seconds(self) -> dict[str, tuple[float, float]]:
        """Return the seconds of each part on the wall's clock, and on the processor's."""
        found = {}
        for name, work in self.parts.items():
            wall, processor = time.perf_counter(), time.process_time()
            work()
            found[name] = time.perf_counter() - wall, time.process_time() - processor
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    step = Step(given.completions, given.tokens)
    runs = [step.seconds() for _ in range(given.runs)]
    parts = {name: [run[name] for run in runs] for name in step.parts}
    for name, times in {**parts, "all": [tuple(map(sum, zip(*run.values(), strict=True))) for run in runs]}.items():
        wall, processor = map(median, zip(*times, strict=True))
        print(f"{name:<26} {wall:.3f} s, processor time {processor:.3f} s")


if __name__ == "__main__":
    main()
