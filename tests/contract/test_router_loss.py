"""The loss that balances experts has one gradient, over training engines, data ranks and a ring."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.engines import ENGINES, ZERO
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples, make_tiny_mixture
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import Budget, pack_samples, plan_micro_batches
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

Found = tuple[float, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Case:
    engine: str = "zero0"
    ring: int = 1
    checkpointing: bool = False


ALONE = Case()
PAIR = [
    *(Case(engine) for engine in (*ZERO, "fsdp2")),
    *(Case(engine, checkpointing=True) for engine in ("zero3", "fsdp2")),
    *(Case(engine, ring=2) for engine in ("zero2", "fsdp2")),
    Case("zero2-experts"),
]


def balance(rank: int, world: int, model: str, cases: list[Case]) -> dict[Case, Found]:
    found = {}
    samples = make_samples(7, seed=3)
    set_weights(samples, "token_mean", 0)
    for case in cases:
        settings = ENGINES[case.engine] | {"router_aux_loss_coef": 3.0, "max_grad_norm": 0.0, "learning_rate": 1e-6}
        shape = ModelConfig(
            path=model, dtype="float32", context_parallel=case.ring, gradient_checkpointing=case.checkpointing
        )
        worker = started(Worker(WorkerSpec(shape, TrainingConfig.parse(settings), rank, world, 100, 0)))
        mesh, packed = worker.spec.mesh(), pack_samples(samples)
        plan = plan_micro_batches([sample.length() for sample in samples], mesh.data, Budget(10_000, 2))
        mine = plan[mesh.data_place(rank)]
        counts = torch.tensor(worker.count_experts(packed, mine))
        dist.all_reduce(counts)
        learning = replace(LossSettings(), expert_counts=(counts / case.ring).tolist())
        report = worker.accumulate(packed, mine, "sft", learning)
        found[case] = report.sums["router_loss"], worker.gradients()
    return found


@pytest.mark.slow
def test_every_division_has_the_same_gradient(tmp_path: Path) -> None:
    model = str(make_tiny_mixture(tmp_path / "model"))
    loss, gradients = run_ranks(balance, 1, tmp_path / "alone", model, [ALONE])[0][ALONE]
    pair = run_ranks(balance, 2, tmp_path / "pair", model, PAIR)
    for case in PAIR:
        parts = [found[case][0] for found in pair]
        assert sum(parts) / case.ring == pytest.approx(loss, rel=1e-5), case
        for name, expected in gradients.items():
            np.testing.assert_allclose(pair[0][case][1][name], expected, atol=5e-6, err_msg=f"{case} {name}")
