"""One suite for every training engine: the gradient and the saved state do not depend on how the work is cut."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples, make_tiny_model
from trueline.algorithms.weighting import set_weights
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import Budget, plan_micro_batches
from trueline.data.types import PackedSamples, Sample, pack_samples
from trueline.training.group import LossSettings
from trueline.training.worker import Worker, WorkerSpec

STAGES = (0, 1, 2, 3)
ROWS = (1, 2, 4, None)  # sequences per forward pass; None is all at once
SAMPLES = 11  # does not divide by two ranks, so one of them gets a filler or a smaller share
FROZEN_RATE = 1e-12  # moves no float32 weight, so that many gradients can be taken of one model

Gradients = dict[str, np.ndarray]


def minibatch() -> list[Sample]:
    samples = make_samples(SAMPLES, seed=3)
    set_weights(samples, "token_mean", 24)
    return samples


def settings() -> LossSettings:
    return LossSettings(
        0.8, AlgorithmConfig.parse({"preset": "grpo", "kl": {"coefficient": 0.1}, "entropy_coefficient": 0.01})
    )


def make_worker(spec: tuple[str, str, int, float], rank: int, world: int) -> Worker:
    model, engine, stage, rate = spec
    config = TrainingConfig(engine=engine, zero_stage=stage, learning_rate=rate, max_grad_norm=0.0)  # type: ignore[arg-type]
    return started(Worker(WorkerSpec(ModelConfig(path=model, dtype="float32"), config, rank, world, 100, 0)))


def share_of(samples: list[Sample], rank: int, world: int, rows: int | None) -> tuple[PackedSamples, list[list[int]]]:
    plan = plan_micro_batches([sample.length() for sample in samples], world, Budget(10_000, rows))
    return pack_samples(samples), plan[rank]


def all_gradients(
    rank: int, world: int, model: str, engines: list[tuple[str, int]]
) -> dict[tuple[str, int, int | None], Gradients]:
    found = {}
    for engine, stage in engines:
        worker = make_worker((model, engine, stage, FROZEN_RATE), rank, world)
        for rows in ROWS:
            worker.accumulate(*share_of(minibatch(), rank, world, rows), "policy", settings())
            found[engine, stage, rows] = worker.gradients()
            worker.engine.step()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), tied=True))


@pytest.fixture(scope="module")
def gradients(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Gradients]:
    """By (ranks, engine, stage, rows)."""
    folder = tmp_path_factory.mktemp("gradients")
    deepspeed = [("deepspeed", stage) for stage in STAGES]
    alone = run_ranks(all_gradients, 1, folder / "1", model, [("torch", 0), *deepspeed])
    together = run_ranks(all_gradients, 2, folder / "2", model, deepspeed)
    for key, one in together[0].items():
        for name in one:
            np.testing.assert_allclose(one[name], together[1][key][name], rtol=1e-6, atol=1e-9)
    return {(1, *key): value for key, value in alone[0].items()} | {
        (2, *key): value for key, value in together[0].items()
    }


CASES = [(1, "torch", 0, rows) for rows in ROWS] + [
    (ranks, "deepspeed", stage, rows) for ranks in (1, 2) for stage in STAGES for rows in ROWS
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_gradient_does_not_depend_on_the_cut(case: tuple[Any, ...], gradients: dict[Any, Gradients]) -> None:
    expected = gradients[1, "torch", 0, None]
    assert set(gradients[case]) == set(expected)
    for name, tensor in gradients[case].items():
        distance = np.linalg.norm(tensor - expected[name]) / np.linalg.norm(expected[name])
        assert distance < 1e-5, f"{name}: {distance:.2e}"


def train(worker: Worker, rank: int, world: int, rounds: range) -> list[float]:
    losses = []
    for number in rounds:
        samples = make_samples(6, seed=number)
        set_weights(samples, "sequence_mean", 24)
        losses.append(worker.update(*share_of(samples, rank, world, 2), "policy", settings()).sums["loss"])
    return losses


def weights_of(worker: Worker) -> Gradients:
    return {name: tensor.numpy().copy() for name, tensor in worker.copy_weights()}


def train_and_save(
    rank: int, world: int, model: str, folder: str, engines: list[tuple[str, int]]
) -> dict[tuple[str, int], Gradients]:
    """Two steps, a checkpoint, two more steps: the uninterrupted run."""
    ends = {}
    for engine, stage in engines:
        worker = make_worker((model, engine, stage, 1e-3), rank, world)
        train(worker, rank, world, range(2))
        worker.save(f"{folder}/{engine}-{stage}-{world}")
        train(worker, rank, world, range(2, 4))
        ends[engine, stage] = weights_of(worker)
    return ends


def load_and_train(rank: int, world: int, model: str, cases: list[tuple[str, str, int]]) -> list[Gradients]:
    """Two more steps from each saved folder."""
    ends = []
    for folder, engine, stage in cases:
        worker = make_worker((model, engine, stage, 1e-3), rank, world)
        worker.load(folder)
        train(worker, rank, world, range(2, 4))
        ends.append(weights_of(worker))
    return ends


def test_resumed_training_equals_uninterrupted(model: str, tmp_path: Path) -> None:
    """Bit for bit on the same ranks and stage; within rounding on others."""
    engines = [("deepspeed", stage) for stage in STAGES]
    whole = run_ranks(train_and_save, 2, tmp_path / "whole", model, str(tmp_path), engines)[0]
    same = [(f"{tmp_path}/deepspeed-{stage}-2", "deepspeed", stage) for stage in STAGES]
    other = [(f"{tmp_path}/deepspeed-{stage}-2", "deepspeed", 3 - stage) for stage in STAGES]
    resumed = run_ranks(load_and_train, 2, tmp_path / "same", model, same + other)[0]
    alone = run_ranks(load_and_train, 1, tmp_path / "alone", model, [*same, (same[3][0], "torch", 0)])[0]
    for stage, end in zip(STAGES, resumed, strict=False):
        for name, tensor in end.items():
            assert np.array_equal(tensor, whole["deepspeed", stage][name]), f"stage {stage}: {name} differs"
    for end in [*resumed[len(STAGES) :], *alone]:
        for name, tensor in end.items():
            expected = whole["deepspeed", 0][name]
            distance = np.linalg.norm(tensor - expected) / np.linalg.norm(expected)
            assert distance < 1e-5, f"{name}: {distance:.2e}"


def train_in_bfloat16(rank: int, world: int, model: str, folder: str) -> dict[int, list[float]]:
    """Losses of six steps, with a save and a load in the middle, at every stage."""
    losses = {}
    for stage in STAGES:
        config = TrainingConfig(zero_stage=stage, learning_rate=1e-3)  # type: ignore[arg-type]
        spec = WorkerSpec(ModelConfig(path=model, dtype="bfloat16"), config, rank, world, 100, 0)
        worker = started(Worker(spec))
        losses[stage] = train(worker, rank, world, range(3))
        worker.save(f"{folder}/{stage}")
        again = started(Worker(spec))
        again.load(f"{folder}/{stage}")
        losses[stage] += train(again, rank, world, range(3, 6))
    return losses


def test_bfloat16_follows_float32(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower precision, same course; master weights and moments survive a checkpoint."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines announce AMX and lack it
    exact = run_ranks(float32_losses, 1, tmp_path / "exact", model)[0]
    lower = run_ranks(train_in_bfloat16, 1, tmp_path / "lower", model, str(tmp_path))[0]
    for stage, losses in lower.items():
        np.testing.assert_allclose(losses, exact, atol=0.02, err_msg=f"stage {stage}")


def float32_losses(rank: int, world: int, model: str) -> list[float]:
    return train(make_worker((model, "deepspeed", 2, 1e-3), rank, world), rank, world, range(6))
