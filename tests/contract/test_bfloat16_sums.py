"""In bfloat16 too, micro-batches do not change a gradient: they are summed in float32 by every engine."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.support.engines import ENGINES, FSDP2, ZERO
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples, make_tiny_model
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import pack_samples
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

pytestmark = pytest.mark.slow

SAMPLES = 64
HALF_STEP = 2**-8  # of bfloat16: no number is rounded by a larger share of itself
FROZEN_RATE = 1e-12  # moves no weight, so that many gradients can be taken of one model

Gradients = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    engine: str = "zero2"
    offload: str = "none"
    ranks: int = 1


ALONE = [
    *(Case(engine) for engine in (*ZERO, "fsdp2")),
    Case("zero1", "optimizer"),
    Case("zero3", "all"),
    Case("fsdp2", "all"),
]
PAIR = [Case(engine, ranks=2) for engine in ("zero1", "zero3", *FSDP2)]
BASE = ALONE[0]


def take_gradients(rank: int, world: int, model: str, cases: list[Case]) -> dict[Case, list[Gradients]]:
    """Of all samples, one to a pass. In the first case of one rank also of all in one pass, and of each alone."""
    samples = make_samples(SAMPLES, seed=5, longest=24)
    set_weights(samples, "token_mean", 0)
    packed, found = pack_samples(samples), {}
    for case in cases:
        training = TrainingConfig.parse(ENGINES[case.engine] | {"offload": case.offload, "learning_rate": FROZEN_RATE})
        spec = WorkerSpec(ModelConfig(path=model, dtype="bfloat16"), training, rank, world, 1000, seed=0)
        worker = started(Worker(spec))
        plans = [[[number] for number in range(rank, SAMPLES, world)]]
        if case == BASE:
            plans += [[list(range(SAMPLES))], *([[number]] for number in range(SAMPLES))]
        found[case] = []
        for plan in plans:
            worker.accumulate(packed, plan, "sft", LossSettings())
            found[case].append(worker.gradients())
            worker.engine.step()
    return found


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[Gradients]]:
    folder = tmp_path_factory.mktemp("gradients")
    model = str(make_tiny_model(folder / "model", tied=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines announce AMX and lack it
        alone = run_ranks(take_gradients, 1, folder / "alone", model, ALONE)[0]
        return alone | run_ranks(take_gradients, 2, folder / "pair", model, PAIR)[0]


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def summed(parts: list[np.ndarray], case: Case) -> np.ndarray:
    """Over ranks as gradients travel, in bfloat16 or, with FSDP2, in float32; over passes exactly."""
    travels = torch.float32 if case.engine in FSDP2 else torch.bfloat16
    passes = torch.tensor(np.stack(parts)).unflatten(0, (-1, case.ranks)).sum(1).to(travels)
    return passes.double().sum(0).numpy()


@pytest.mark.parametrize("case", [*ALONE, *PAIR], ids=str)
def test_passes_are_summed_in_float32(case: Case, gradients: dict[Case, list[Gradients]]) -> None:
    """Gradients of single samples add up to float32's rounding, not to bfloat16's."""
    for name, tensor in gradients[case][0].items():
        parts = [each[name] for each in gradients[BASE][2:]]
        assert distance(tensor, summed(parts, case)) < 1e-6, name


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_one_pass_or_many_differ_by_one_rounding(case: Case, gradients: dict[Case, list[Gradients]]) -> None:
    """The one pass rounds the sum, by a share h of it at most; the many round each part g by h g.

    Roundings of different passes are independent, so their squares add up, and the distance stays below
    h (|sum| + sqrt(sum of |g|^2)).
    """
    one, parts = gradients[BASE][1], gradients[BASE][2:]
    for name, whole in one.items():
        spread = np.sqrt(sum(np.square(each[name]).sum() for each in parts)) / np.linalg.norm(whole)
        assert distance(gradients[case][0][name], whole) < HALF_STEP * (1 + spread), name
