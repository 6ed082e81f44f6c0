"""Mixtures under ZeRO and FSDP2: whichever ranks hold fused experts, files and engines get them as files have them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.support.architectures import make_model
from tests.support.engines import ENGINES, ZERO
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.model import LoraConfig, ModelConfig, TrainingConfig
from trueline.data.batching import Budget, pack_samples, plan_micro_batches
from trueline.runtime.transport import plan_buckets
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

DIVIDED = (*ZERO, "fsdp2")
RATE = 1e-2  # what AdamW's first step moves a weight by; of the smallest gradients it magnifies the rounding
Weights = dict[str, np.ndarray]


def make_worker(rank: int, world: int, model: ModelConfig, engine: str) -> Worker:
    training = TrainingConfig.parse(ENGINES[engine] | {"learning_rate": RATE})
    return started(Worker(WorkerSpec(model, training, rank, world, 4, 0)))


def update(worker: Worker, rank: int, world: int) -> None:
    samples = make_samples(2 * world)
    set_weights(samples, "token_mean", 0)
    mine = samples[rank::world]
    (passes,) = plan_micro_batches([sample.length() for sample in mine], 1, Budget(512))
    worker.update(pack_samples(mine), passes, "sft", LossSettings())


def sent(worker: Worker) -> Weights:
    """What engines are told to expect, filled as they are sent: every rank asks for the tensors in turn."""
    specs = worker.weight_specs("float32")
    buckets = plan_buckets(specs, 4096)
    assert worker.send_weights(buckets) == []  # nobody listens
    found = {name: tensor.float().numpy().copy() for name, tensor in worker.outgoing.plain_weights()}
    assert {spec.name: spec.shape for spec in specs} == {name: array.shape for name, array in found.items()}
    return found


def train_and_save(rank: int, world: int, model: str, folder: Path) -> dict[str, Weights]:
    found: dict[str, Weights] = {}
    config = ModelConfig(path=model, dtype="float32")
    for engine in DIVIDED:
        worker = make_worker(rank, world, config, engine)
        update(worker, rank, world)
        target = folder / engine
        target.mkdir(parents=True, exist_ok=True)
        worker.save(str(target))
        saved = worker.save_result(wait=True)
        assert saved is not None and saved.problem is None
        found[engine] = sent(worker)
    torch.distributed.barrier()
    again = make_worker(rank, world, config, "zero3")
    again.load(str(folder / "zero1"))
    found["resumed"] = sent(again)
    adapted = replace_lora(config)
    for engine in ("zero3", "fsdp2"):
        found[f"adapters, {engine}"] = sent(make_worker(rank, world, adapted, engine))
    return found


def replace_lora(config: ModelConfig) -> ModelConfig:
    return config.with_keys({"lora": LoraConfig(rank=2).model_dump()})


def on_disk(folder: Path) -> Weights:
    found: Weights = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_every_engine_saves_and_sends_the_names_on_disk(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", kind)
    start = on_disk(model)
    for found in run_ranks(train_and_save, 2, tmp_path / "ranks", str(model), tmp_path / "saved"):
        assert all(weights.keys() == start.keys() for weights in found.values())
        for name, tensor in start.items():
            for engine in ("zero3", "fsdp2"):
                np.testing.assert_array_equal(found[f"adapters, {engine}"][name], tensor)
            np.testing.assert_array_equal(found["resumed"][name], found["zero1"][name])
            for engine in DIVIDED:
                np.testing.assert_allclose(found[engine][name], found["zero0"][name], atol=RATE / 10)
        for engine in DIVIDED:
            saved = on_disk(tmp_path / "saved" / engine / "model")
            assert saved.keys() == start.keys()
            assert all(np.array_equal(saved[name], found[engine][name]) for name in saved)
        trained = found["zero0"]
        assert any(not np.array_equal(trained[name], start[name]) for name in start if ".experts." in name)


def keep_bias(rank: int, world: int, model: str) -> dict[str, Any]:
    worker = make_worker(rank, world, ModelConfig(path=model, dtype="bfloat16"), "zero2")
    fixed = {name: tensor.numpy() for name, tensor in worker.outgoing.plain_weights() if name in worker.names.fixed}
    specs = {spec.name: spec.dtype for spec in worker.weight_specs("bfloat16")}
    held = {name: tensor.numpy() for name, tensor in worker.model.named_buffers() if name in worker.names.buffers}
    return {"fixed": fixed, "specs": specs, "held": held}


def test_the_bias_of_routers_keeps_the_precision_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines announce AMX and lack it
    model = make_model(tmp_path / "model", "glm4_moe")
    (found,) = run_ranks(keep_bias, 1, tmp_path / "ranks", str(model))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    expected = on_disk(model)[name]
    assert expected.any()
    np.testing.assert_array_equal(found["fixed"][name], expected)
    np.testing.assert_array_equal(found["held"][name], expected)
    assert {kind for kind, dtype in found["specs"].items() if dtype == "float32"} == {name}
