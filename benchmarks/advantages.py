"""Milliseconds of GAE on 64 answers of 8,192 tokens each, on one thread: the median of 50 runs.

    python benchmarks/advantages.py

Processor time is that of this process alone; look at it where other programs run beside.
"""

import time
from statistics import median

import torch

from trueline.algorithms.advantages import assign_advantages
from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Sample

ANSWERS, TOKENS, PROMPT, RUNS = 64, 8192, 128, 50


def make_samples() -> list[Sample]:
    length = PROMPT + TOKENS
    samples = [Sample(torch.zeros(length, dtype=torch.long), torch.arange(length) >= PROMPT) for _ in range(ANSWERS)]
    for sample in samples:
        sample.token_rewards, sample.values = torch.randn(2, length)
    return samples


def milliseconds(samples: list[Sample], config: AlgorithmConfig) -> tuple[float, float]:
    """On the wall's clock, and on the processor's."""
    wall, processor = time.perf_counter(), time.process_time()
    assign_advantages(samples, config)
    return 1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - processor)


def main() -> None:
    torch.set_num_threads(1)
    samples = make_samples()
    for whiten in (False, True):
        config = AlgorithmConfig(preset="ppo", whiten=whiten, gae_lambda=0.95)
        assign_advantages(samples, config)
        wall, processor = zip(*(milliseconds(samples, config) for _ in range(RUNS)), strict=True)
        print(f"GAE, whiten={whiten}: {median(wall):.1f} ms, processor time {median(processor):.1f} ms")


if __name__ == "__main__":
    main()
