"""Tokens per second of a training step against a bare PyTorch loop with the same kernels, on packed mixed lengths.

    python benchmarks/train_throughput.py [--shape 1.5B] [--samples 128] [--longest 2048] [--tokens 16384] [--steps 8]
        [--out FILE]

All sides compute the same log-probs of the same passes and step torch's fused AdamW. Trueline's worker, by DeepSpeed,
keeps float32 sums of gradients and float32 weights, clips, checks and reports. The bare loop keeps the same sums and
weights and clips by the same norm; `rough` is a loop that rounds all of them to the type it computes in, which trains
worse and shows what exactness costs. Each side has two turns, one after the other, as a device may be slower at first;
medians of the steps of both turns from the third on, with and without checkpointing.
"""

import math
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from random_model import SHAPES, make_model, make_parser, write_result

from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import Budget, collate, pack_samples, plan_micro_batches
from trueline.data.types import Sample
from trueline.models.head import HEAD_CHUNK
from trueline.models.loading import DTYPES, load_model
from trueline.models.scorer import Scorer
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = "bfloat16" if DEVICE.type == "cuda" else "float32"
WARM = 2


def make_samples(count: int, longest: int, words: int) -> list[Sample]:
    """Lengths are spread evenly on a logarithmic scale; the last three quarters of each are learnt."""
    random = torch.Generator().manual_seed(0)
    samples = []
    for place in torch.rand(count, generator=random).tolist():
        length = int(math.exp(math.log(64) + place * math.log(longest / 64)))
        tokens = torch.randint(0, words, (length,), generator=random)
        samples.append(Sample(tokens, torch.arange(length) >= length // 4))
    set_weights(samples, "token_mean", longest)
    return samples


def synchronized_time() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def time_steps(step: Any, steps: int) -> list[float]:
    seconds = []
    for _ in range(steps):
        start = synchronized_time()
        step()
        seconds.append(synchronized_time() - start)
    return seconds[WARM:]


def ours(config: ModelConfig, packed: Any, passes: Any, steps: int) -> list[float]:
    worker = Worker(WorkerSpec(config, TrainingConfig(learning_rate=1e-6), 0, 1, 1000, 0))
    worker.start(worker.listen())
    return time_steps(lambda: worker.update(packed, passes, "sft", LossSettings()), steps)


def make_scorer(config: ModelConfig) -> Scorer:
    model = load_model(config, DTYPES[DTYPE], packed=True).to(DEVICE)
    return Scorer(model, HEAD_CHUNK[DEVICE.type]).train()


def run_pass(scorer: Scorer, packed: Any, micro_batch: Any) -> None:
    batch = collate(packed, micro_batch, DEVICE)
    found = scorer(batch.tokens, batch.mask_bytes(), batch.lengths, 1.0, entropy=False)
    (-(batch.token_weights() * found["logprobs"]).sum()).backward()


def rough(config: ModelConfig, packed: Any, passes: Any, steps: int) -> list[float]:
    scorer = make_scorer(config)
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        for micro_batch in passes:
            run_pass(scorer, packed, micro_batch)
        optimizer.step()
        optimizer.zero_grad()

    return time_steps(step, steps)


def bare(config: ModelConfig, packed: Any, passes: Any, steps: int) -> list[float]:
    scorer = make_scorer(config)
    weights = list(scorer.parameters())
    masters = [weight.detach().float().clone() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-6, fused=True)

    def step() -> None:
        for master in masters:
            master.grad = torch.zeros_like(master)
        sums = [master.grad for master in masters]
        for micro_batch in passes:
            run_pass(scorer, packed, micro_batch)
            torch._foreach_add_(sums, [weight.grad for weight in weights])
            for weight in weights:
                weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        optimizer.zero_grad()

    return time_steps(step, steps)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="1.5B", choices=SHAPES)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", given.shape)
        samples = make_samples(given.samples, given.longest, 1000)
        packed, tokens = pack_samples(samples), sum(sample.length() for sample in samples)
        (passes,) = plan_micro_batches([sample.length() for sample in samples], 1, Budget(given.tokens))
        for again in (False, True):
            config = ModelConfig(path=f"{folder}/model", dtype=DTYPE, gradient_checkpointing=again)
            seconds: dict[str, list[float]] = {"rough": [], "bare": [], "ours": []}
            for side in (rough, bare, ours) * 2:
                seconds[side.__name__] += side(config, packed, passes, given.steps)
            speeds = {side: tokens / median(every) for side, every in seconds.items()}
            name = "checkpointed" if again else "plain"
            found[name] = speeds | {"ratio": speeds["ours"] / speeds["bare"]}
            print(f"{name:<13} " + "  ".join(f"{key} {value:.4g}" for key, value in found[name].items()), flush=True)
    write_result(given.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
