"""What keeping the samples of a step costs (monitoring.keep_samples_mib): bytes and seconds, without a model.

    python benchmarks/kept_samples.py [--completions 128] [--tokens 1024] [--vocabulary 128000]

Tokens and log-probs are random, which compresses worse than those of a model; half of each sequence is sampled.
"""

import argparse
import time
from statistics import median

import numpy as np

from trueline.config.rl import RLConfig
from trueline.runtime.actors import Stored
from trueline.training.kept_samples import KeptStep, Update
from trueline.training.samples import Fields, SampleBlock, SampleNumbers, StoredSamples

ROUNDS, LETTERS = 5, 4  # letters of a token in a text


def make_step(completions: int, tokens: int, vocabulary: int) -> KeptStep:
    chance, whole = np.random.default_rng(0), completions * tokens
    mask = np.tile(np.arange(tokens) >= tokens // 2, completions)
    gaps = [chance.normal(scale=scale, size=whole) for scale in (1.0, 1e-3, 0.1, 1.0)]
    known = -np.abs(gaps[0])
    arrays = {
        "tokens": chance.integers(0, vocabulary, whole).astype(np.int32),
        "mask": mask,
        **{name: (known * mask).astype(np.float32) for name in ("rollout_logprobs",)},
        "old_logprobs": ((known + gaps[1]) * mask).astype(np.float32),
        "ref_logprobs": ((known + gaps[2]) * mask).astype(np.float32),
        "entropy": (np.abs(gaps[3]) * mask).astype(np.float32),
        "advantages": (np.repeat(chance.normal(size=completions), tokens) * mask).astype(np.float32),
        "token_rewards": np.zeros(whole, np.float32),
    }
    rows = [SampleNumbers(tokens, tokens // 2, at // 8, at, 0, 1.0, 0.0, False) for at in range(completions)]
    block = SampleBlock(tuple(arrays), tuple(range(completions)), Stored(arrays))
    samples = StoredSamples(list(range(completions)), rows, Fields([tokens] * completions, [block]))
    text = "".join(map(chr, chance.integers(97, 123, tokens * LETTERS)))
    updates = [Update("policy", samples.numbers, [1.0] * completions, {"temperature": 1.0}, {"loss": 0.0})]
    calls = [{"reply": text, "prompt": text, "number": at} for at in range(completions)]
    return KeptStep(1, RLConfig().model_dump(mode="json"), updates, samples, calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    given = parser.parse_args()
    kept, took = make_step(given.completions, given.tokens, given.vocabulary), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        size = len(kept.pack())
        took.append(time.perf_counter() - start)
    whole = given.completions * given.tokens
    print(f"{whole} tokens: {size / 2**20:.2f} MiB, {size / whole:.1f} bytes a token, {median(took):.2f} s")


if __name__ == "__main__":
    main()
