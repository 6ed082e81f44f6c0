"""A training step on groups of answers to long prompts, with each prompt computed once and with every sequence whole.

    python benchmarks/shared_prefix.py [--shape 1.5B] [--groups 8x8] [--prompt 2048] [--answer 256] [--tokens 16384]
        [--steps 5] [--out FILE]

Both sides are one worker, by DeepSpeed, in turns, and count the tokens of whole sequences; medians of the steps from
the third on. Log-probs and the gradient of the same samples are compared too: of the two sides, and, for what rounding
does, of whole sequences in passes of half the size. The exit status is 1 if the sides differ by more than twice that.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from random_model import SHAPES, make_model, make_parser, read_size, write_result

from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.types import Sample
from trueline.runtime.actors import LocalActor
from trueline.training.group import ModelGroup
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

GPU = torch.cuda.is_available()
WARM = 2
SETTINGS = LossSettings(1.0, AlgorithmConfig.parse({"preset": "grpo", "kl": {"coefficient": 0}}))
LEAST = 1e-5  # differences that are rounding in float32
Numbers = dict[str, float]


def make_samples(groups: int, size: int, prompt: int, answer: int, words: int) -> list[Sample]:
    random = torch.Generator().manual_seed(0)
    samples = []
    for group in range(groups):
        shared = torch.randint(3, words, (prompt,), generator=random)
        for _ in range(size):
            tokens = torch.cat([shared, torch.randint(3, words, (answer,), generator=random)])
            sample = Sample(tokens, torch.arange(prompt + answer) >= prompt, group)
            sample.rollout_logprobs = sample.old_logprobs = -7.0 * sample.mask
            sample.advantages = torch.randn(1, generator=random) * sample.mask
            samples.append(sample)
    set_weights(samples, "token_mean", answer)
    return samples


def time_step(side: ModelGroup, samples: list[Sample]) -> float:
    start = time.perf_counter()
    side.update(samples, "policy", SETTINGS)
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def take_numbers(side: ModelGroup, worker: Worker, samples: list[Sample]) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    """Return the log-probs of learnt tokens, and the gradient, which is discarded."""
    logprobs = torch.cat([found[one.mask] for found, one in zip(side.score(samples), samples, strict=True)])
    side.accumulate(samples, "policy", SETTINGS)
    gradient = worker.gradients()
    worker.engine.discard()
    return logprobs, gradient


def differences(one: Any, other: Any) -> Numbers:
    """Return the mean gap of log-probs, and the distance of gradients over their norm."""
    distance = np.sqrt(sum(np.square(part - other[1][name]).sum(dtype=float) for name, part in one[1].items()))
    norm = np.sqrt(sum(np.square(part).sum(dtype=float) for part in other[1].values()))
    return {"logprobs": (one[0] - other[0]).abs().mean().item(), "gradient": float(distance / norm)}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="1.5B", choices=SHAPES)
    parser.add_argument("--groups", type=read_size, default=(8, 8), metavar="GROUPSxANSWERS")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    samples = make_samples(*given.groups, given.prompt, given.answer, 1000)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), given.shape)
        config = ModelConfig(path=folder, dtype="bfloat16" if GPU else "float32")
        worker = Worker(WorkerSpec(config, TrainingConfig(learning_rate=1e-6), 0, 1, 1000, 0))
        worker.start(worker.listen())

    def make_side(shares: bool, tokens: int = given.tokens) -> ModelGroup:
        ranks = TrainingConfig(learning_rate=1e-6, micro_batch_tokens=tokens, share_prefixes=shares)
        return ModelGroup("policy", [LocalActor("policy-0", worker)], ranks, 600.0)

    sides = {"whole": make_side(False), "shared": make_side(True)}
    halves = make_side(False, max(given.tokens // 2, given.prompt + given.answer))
    numbers = {name: take_numbers(side, worker, samples) for name, side in (*sides.items(), ("halves", halves))}
    gaps = {name: differences(numbers[name], numbers["whole"]) for name in ("shared", "halves")}
    del numbers
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(given.steps):
        for name, side in sides.items():
            seconds[name].append(time_step(side, samples))
    tokens = sum(one.length() for one in samples)
    speeds = {name: tokens / median(every[WARM:]) for name, every in seconds.items()}
    found = {
        "tokens_per_second": speeds,
        "ratio": speeds["shared"] / speeds["whole"],
        "saved": sides["shared"].plan(samples).saved,
        "gaps": gaps,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0,
    }
    for name, value in found.items():
        print(f"{name:<18} {value}", flush=True)
    write_result(given.out, found)
    exact = all(gaps["shared"][name] <= max(2 * gaps["halves"][name], LEAST) for name in gaps["shared"])
    return int(not (exact and sides["shared"].sharing))


if __name__ == "__main__":
    sys.exit(main())
