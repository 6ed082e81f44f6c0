"""Compiled layers: the numbers and gradients of plain ones, proven by the first batch, or plain layers instead."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.utils import _to_kwargs

from tests.support.architectures import make_model
from tests.support.tiny import make_samples
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.types import Sample
from trueline.monitoring.findings import Finding
from trueline.runtime.actors import LocalActor
from trueline.training.group import ModelGroup
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec


def minibatch(seed: int = 6) -> list[Sample]:
    samples = make_samples(8, seed=seed, longest=24, shared=20)
    set_weights(samples, "token_mean", 0)
    return samples


def make_group(folder: Path, *, compiled: bool, again: bool = False, **keys: Any) -> tuple[ModelGroup, Worker]:
    model = ModelConfig(path=str(folder), dtype="float32", gradient_checkpointing=again)
    ranks = TrainingConfig.parse({"engine": "torch", "learning_rate": 1e-3, "compile": compiled, **keys})
    worker = Worker(WorkerSpec(model, ranks, 0, 1, total_steps=4, seed=0))
    worker.start(("", 0))
    return ModelGroup("policy", [LocalActor("policy-0", worker)], ranks, timeout_seconds=600), worker


def run_steps(group: ModelGroup, worker: Worker) -> list[Any]:
    """Two steps on passes of different lengths, and scores without gradients."""
    norms = [group.update(minibatch(seed), "sft", LossSettings())["grad_norm"] for seed in (6, 7)]
    group.accumulate(minibatch(8), "sft", LossSettings())
    return [*norms, torch.cat(group.score(minibatch(9))).numpy(), *worker.gradients().values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("", {"micro_batch_tokens": 150}),
        ("", {"micro_batch_tokens": 150, "packing": False, "again": True}),
        ("gemma3_text", {}),
    ],
)
def test_compiled_layers_train_alike(kind: str, keys: dict[str, Any], model_folder: Path, tmp_path: Path) -> None:
    folder = make_model(tmp_path / kind, kind) if kind else model_folder
    torch._dynamo.reset()
    compiled, worker = make_group(folder, compiled=True, **keys)
    found = run_steps(compiled, worker)
    assert worker.compiled is not None and worker.compiled.proven and not worker.compiled.doubt
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert all(layer._compiled_call_impl is not None for layer in worker.compiled.layers)
    for one, other in zip(found, run_steps(*make_group(folder, compiled=False, **keys)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_layers_that_compile_wrongly_are_not_used(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_wrongly(layer: torch.nn.Module, **_: Any) -> None:
        call = layer._call_impl
        layer._compiled_call_impl = lambda *given, **named: wrong(call(*given, **named))

    def wrong(states: Tensor) -> Tensor:
        return states + (0.1 * states - (0.1 * states).detach())  # the right outputs, other gradients

    monkeypatch.setattr(torch.nn.Module, "compile", compile_wrongly)
    group, worker = make_group(model_folder, compiled=True)
    found: list[Finding] = []
    group.report = found.append
    norms = [group.update(minibatch(), "sft", LossSettings())["grad_norm"] for _ in range(2)]
    assert [(one.code, one.key) for one in found] == [("compiled_differs", "compile")]
    assert "policy: compiled layers move log-probs or gradients by 0." in found[0].what
    plain, _ = make_group(model_folder, compiled=False)
    assert norms == [plain.update(minibatch(), "sft", LossSettings())["grad_norm"] for _ in range(2)]
    assert worker.compiled is not None and worker.compiled.layers[0]._compiled_call_impl is None


def test_no_pass_gives_fsdp2_a_mask_that_it_would_move_to_a_gpu(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the root of FSDP2 does to the arguments of a pass, and of the proof of compiled layers."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    group, worker = make_group(model_folder, compiled=True)
    moved: list[Any] = []

    def record(_: torch.nn.Module, given: tuple[Any, ...]) -> None:
        (there,), _ = _to_kwargs(given, {}, torch.device("meta"), False)  # type: ignore[no-untyped-call]
        moved.append((there[0].device.type, type(there[1])))

    worker.scorer.register_forward_pre_hook(record)
    group.update(minibatch(), "sft", LossSettings())
    assert worker.compiled is not None and worker.compiled.proven and len(moved) > 2
    assert set(moved) == {("meta", bytes)}
