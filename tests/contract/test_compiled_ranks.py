"""Compiled layers on ranks that gather them: the gradients of plain layers, also where a rank has only a filler."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.engines import ENGINES
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples, make_tiny_model
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import FILLER, pack_samples
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

ENGINE_NAMES = ("zero2", "fsdp2", "fsdp2-kept")
PASSES = [[[0, 1], [2]], [[FILLER], [3]]]  # of each rank

Found = dict[tuple[str, bool], tuple[dict[str, np.ndarray], str]]


def take_gradients(rank: int, world: int, model: str) -> Found:
    found = {}
    samples = make_samples(4, seed=6, longest=24)
    set_weights(samples, "token_mean", 0)
    for engine in ENGINE_NAMES:
        for compiled in (False, True):
            keys = ENGINES[engine] | {"learning_rate": 1e-12, "compile": compiled}
            spec = WorkerSpec(ModelConfig(path=model, dtype="float32"), TrainingConfig.parse(keys), rank, world, 9, 0)
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            worker = started(Worker(spec))
            report = worker.accumulate(pack_samples(samples), PASSES[rank], "sft", LossSettings())
            found[engine, compiled] = worker.gradients(), report.remark
            if worker.compiled is not None:
                assert worker.compiled.proven and torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
                assert all(layer._compiled_call_impl is not None for layer in worker.compiled.layers)
    return found


@pytest.mark.slow
def test_ranks_with_compiled_layers_have_the_same_gradient(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "model", tied=True))
    for found in run_ranks(take_gradients, 2, tmp_path / "ranks", model):
        for engine in ENGINE_NAMES:
            plain, (gradients, remark) = found[engine, False][0], found[engine, True]
            assert not remark
            for name, expected in plain.items():
                distance = np.linalg.norm(gradients[name] - expected) / np.linalg.norm(expected)
                assert distance < 1e-5, f"{engine}, {name}: {distance:.1e}"
