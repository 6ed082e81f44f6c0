"""Every architecture, and adapters on whole and 4-bit weights: ranks have the gradient of one process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.architectures import ARCHITECTURES, make_model
from tests.support.engines import ENGINES
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import Budget, pack_samples, plan_micro_batches
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

pytestmark = pytest.mark.slow
REFUSED = ("gemma2",)  # by every engine
TWO_KEY_HEADS = {"num_key_value_heads": 2}


@dataclass(frozen=True)
class Case:
    kind: str = "qwen2"
    tensor: int = 1
    lora: int = 0
    quantize: bool = False
    checkpointing: bool = False

    def model(self, folder: Path) -> ModelConfig:
        lora = {"rank": self.lora, "quantize": self.quantize}
        keys = {"dtype": "float32", "tensor_parallel": self.tensor, "gradient_checkpointing": self.checkpointing}
        return ModelConfig.parse({"path": str(folder / self.kind), "lora": lora, **keys})


CASES = {
    "fsdp2": [
        *(Case(kind) for kind in ARCHITECTURES),
        *(Case(kind, tensor=2) for kind in ("qwen2", "qwen3", "gemma3_text", "mistral")),
        *(Case(kind, lora=4, checkpointing=kind == "llama") for kind in ("llama", "qwen3", "mixtral")),
        Case(lora=4, quantize=True),
    ],
    "zero2": [Case(kind, tensor=2) for kind in ("qwen3", "gemma3_text")] + [Case(lora=4, quantize=True)],
}


def take_gradients(rank: int, world: int, folder: Path, engine: str, cases: list[Case]) -> dict[Case, Any]:
    """Of each case: gradients or, if it is refused, the error."""
    found: dict[Case, Any] = {}
    samples = make_samples(6, seed=5, longest=24)
    set_weights(samples, "token_mean", 0)
    for case in cases:
        packing = case.kind != "gemma2" and "training.packing=false" not in ARCHITECTURES[case.kind].words
        keys = ENGINES[engine] | {"learning_rate": 1e-12, "packing": packing}
        try:
            worker = started(Worker(WorkerSpec(case.model(folder), TrainingConfig.parse(keys), rank, world, 9, 0)))
        except ConfigError as error:  # on every rank
            found[case] = str(error)
            continue
        mesh = worker.spec.mesh()
        plan = plan_micro_batches([one.length() for one in samples], mesh.data, Budget(1000, 2, packing))
        worker.accumulate(pack_samples(samples), plan[mesh.data_place(rank)], "sft", LossSettings())
        weights = {name: tensor.float().numpy().copy() for name, tensor in worker.engine.weights()}
        found[case] = worker.gradients(), weights
    return found


@pytest.mark.parametrize("engine", CASES)
def test_every_architecture_has_one_gradient(engine: str, tmp_path: Path) -> None:
    cases, plain = CASES[engine], {case: Case(case.kind, 1, case.lora, case.quantize) for case in CASES[engine]}
    for kind in {case.kind for case in cases}:
        changed = TWO_KEY_HEADS if any(case.kind == kind and case.tensor > 1 for case in cases) else {}
        make_model(tmp_path / kind, kind, **changed)
    (alone,) = run_ranks(take_gradients, 1, tmp_path / "alone", tmp_path, "torch", list({*plain.values()}))
    for divided in (False, True):  # a process whose DeepSpeed has once cut matrices cannot train uncut ones
        chosen = [case for case in cases if (case.tensor > 1) == divided]
        for found in run_ranks(take_gradients, 2, tmp_path / f"pair{divided}", tmp_path, engine, chosen):
            for case in chosen:
                check(case, found[case], alone[plain[case]])


def check(case: Case, found: Any, expected: Any) -> None:
    if isinstance(expected, str) or isinstance(found, str):
        assert isinstance(found, str) and isinstance(expected, str) and case.kind in REFUSED, (case, expected, found)
        return
    (gradients, weights), (plain, whole) = found, expected
    assert gradients.keys() == plain.keys() and weights.keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(weights[name], tensor, err_msg=f"{case} {name}")
    size = np.sqrt(sum(np.square(one).sum() for one in plain.values()))
    for name, tensor in plain.items():
        # Some gradients are rounding, as that of a bias of keys: softmax does not change with it.
        distance = np.linalg.norm(gradients[name] - tensor) / max(np.linalg.norm(tensor), 1e-3 * size)
        assert distance < 2e-5, f"{case}, {name}: {distance:.1e}"
