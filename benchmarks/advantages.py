"""Milliseconds of GAE on 64 completions of 8,192 tokens each, on one thread: the median of 50 runs.

    python benchmarks/advantages.py [--completions 64] [--tokens 8192] [--runs 50]

Processor time is that of this process alone; use it if other programs run too.
"""

import argparse
import time
from statistics import median

import torch

from trueline.algorithms.advantages import assign_advantages
from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Sample

PROMPT = 128


def make_samples(completions: int, tokens: int) -> list[Sample]:
    length = PROMPT + tokens
    samples = [
        Sample(torch.zeros(length, dtype=torch.long), torch.arange(length) >= PROMPT) for _ in range(completions)
    ]
    for sample in samples:
        sample.token_rewards, sample.values = torch.randn(2, length)
    return samples


def milliseconds(samples: list[Sample], config: AlgorithmConfig) -> tuple[float, float]:
    """On the wall's clock, and on the processor's."""
    wall, processor = time.perf_counter(), time.process_time()
    assign_advantages(samples, config)
    return 1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=50)
    given = parser.parse_args()
    torch.set_num_threads(1)
    samples = make_samples(given.completions, given.tokens)
    for whiten in (False, True):
        config = AlgorithmConfig(preset="ppo", whiten=whiten, gae_lambda=0.95)
        assign_advantages(samples, config)
        wall, processor = zip(*(milliseconds(samples, config) for _ in range(given.runs)), strict=True)
        print(f"GAE, whiten={whiten}: {median(wall):.1f} ms, processor time {median(processor):.1f} ms")


if __name__ == "__main__":
    main()
