"""Replayed experts give one loss and one gradient, over ZeRO stages, data ranks and a ring."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.engines import ENGINES, ZERO
from tests.support.mixtures import by_hand, told_samples
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_tiny_mixture
from trueline.config.model import ModelConfig, PolicyTrainingConfig
from trueline.data.batching import Budget, pack_samples, plan_micro_batches
from trueline.data.types import Sample
from trueline.training.report import AGREED, REPORTED, LossSettings
from trueline.training.worker import Worker, WorkerSpec

Found = tuple[dict[str, float], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Case:
    engine: str
    ring: int = 1
    checkpointing: bool = False


PAIR = [
    *(Case(engine) for engine in (*ZERO, "fsdp2")),
    *(Case(engine, checkpointing=True) for engine in ("zero3", "fsdp2")),
    Case("zero2", ring=2),
    Case("zero3-experts"),
]


def replay(rank: int, world: int, model: str, samples: list[Sample], cases: list[Case]) -> dict[Case, Found]:
    found = {}
    for case in cases:
        settings = ENGINES[case.engine] | {"replay_routing": True, "max_grad_norm": 0.0, "learning_rate": 1e-6}
        shape = ModelConfig(
            path=model, dtype="float32", context_parallel=case.ring, gradient_checkpointing=case.checkpointing
        )
        worker = started(Worker(WorkerSpec(shape, PolicyTrainingConfig.parse(settings), rank, world, 100, 0)))
        mesh = worker.spec.mesh()
        plan = plan_micro_batches([sample.length() for sample in samples], mesh.data, Budget(10_000, 2))
        report = worker.accumulate(pack_samples(samples), plan[mesh.data_place(rank)], "sft", LossSettings())
        found[case] = report.sums, worker.gradients()
    return found


@pytest.mark.slow
def test_every_division_follows_the_same_experts(tmp_path: Path) -> None:
    model = make_tiny_mixture(tmp_path / "model", "qwen3_moe")
    samples = told_samples(model, 7, changed=0.5, untold=0.2)
    logprobs, gradients, _ = by_hand(model, samples)
    loss = -sum((sample.weight * one).sum().item() for sample, one in zip(samples, logprobs, strict=True))
    pair = run_ranks(replay, 2, tmp_path / "pair", str(model), samples, PAIR)
    shares = []
    for case in PAIR:
        sums = {name: sum(found[case][0][name] for found in pair) / case.ring for name in ("loss", AGREED, REPORTED)}
        assert sums["loss"] == pytest.approx(loss, rel=1e-5), case
        shares.append(sums[AGREED] / sums[REPORTED])
        for name, expected in gradients.items():
            np.testing.assert_allclose(pair[0][case][1][name], expected, atol=5e-6, err_msg=f"{case} {name}")
    assert shares == pytest.approx([shares[0]] * len(shares)) and 0.4 < shares[0] < 0.9
