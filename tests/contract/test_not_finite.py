"""A step whose loss or gradient is not finite, on any rank, leaves everything as it was, with every engine."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from tests.support.engines import ENGINES, FSDP2, ZERO
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples, make_tiny_model
from tests.support.whole import whole_state
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import pack_samples
from trueline.training.report import LossSettings, Report
from trueline.training.worker import Worker, WorkerSpec

pytestmark = pytest.mark.slow

COURSE = {"learning_rate": 1e-3, "schedule": "linear", "weight_decay": 0.1, "ema_decay": 0.8}
RANKS, SAMPLES = 2, 8
BAD = {"nan": math.nan, "infinite": math.inf}  # the value of one token; only the first spoils the gradient

State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    engine: str = "zero2"
    dtype: str = "float32"
    offload: str = "none"


OFFLOADED: list[tuple[str, str]] = [("zero2", "optimizer"), ("zero3", "all"), ("fsdp2", "all")]
CASES = [
    *(Case(engine) for engine in (*ZERO, *FSDP2)),
    *(Case(engine, "bfloat16") for engine in ("zero1", "zero3", "fsdp2")),
    *(Case(kind[0], dtype, kind[1]) for kind in OFFLOADED for dtype in ("float32", "bfloat16")),
]


def make_worker(case: Case, rank: int, model: str) -> Worker:
    training = TrainingConfig.parse(COURSE | ENGINES[case.engine] | {"offload": case.offload})
    return started(Worker(WorkerSpec(ModelConfig(path=model, dtype=case.dtype), training, rank, RANKS, 10, seed=0)))


def train(worker: Worker, seed: int, bad: float = 0.0) -> Report:
    """One step of several passes; `bad` stands in the first of the last rank's."""
    samples = make_samples(SAMPLES, seed=seed)
    set_weights(samples, "token_mean", 0)
    samples[1].advantages[-1] += bad
    settings = LossSettings(1.0, AlgorithmConfig.parse({"preset": "dr_grpo", "loss": "tests.support.tiny:offset_loss"}))
    passes = [[number] for number in range(worker.spec.rank, SAMPLES, RANKS)]
    return worker.update(pack_samples(samples), passes, "policy", settings)


def state_of(worker: Worker) -> State:
    """Weights as they compute and as they are stepped, moments, averages, and the number of steps."""
    engine = worker.engine
    found = {f"{name}/copy": tensor.float().numpy().copy() for name, tensor in engine.weights()}
    found |= {name: tensor.numpy() for name, tensor in whole_state(engine).items()}
    return found | {"steps": np.array(engine.steps)}


def stumble(rank: int, world: int, model: str, cases: list[Case]) -> dict[Case, dict[str, State | Report]]:
    """A good step, a bad one of each kind, and a good one; beside it a run of the two good steps."""
    found = {}
    for case in cases:
        worker, plain = make_worker(case, rank, model), make_worker(case, rank, model)
        found[case] = {"first": train(worker, 1), "before": state_of(worker)}
        for name, bad in BAD.items():
            found[case] |= {f"{name} report": train(worker, 2, bad), f"{name} state": state_of(worker)}
        found[case] |= {"last": train(worker, 3), "after": state_of(worker)}
        train(plain, 1)
        train(plain, 3)
        found[case]["plain"] = state_of(plain)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Case, dict[str, State | Report]]]:
    folder = tmp_path_factory.mktemp("stumble")
    model = str(make_tiny_model(folder / "model", tied=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines announce AMX and lack it
        return run_ranks(stumble, RANKS, folder / "ranks", model, CASES)


def changed(one: State, other: State) -> list[str]:
    assert set(one) == set(other)
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_that_is_not_finite_changes_nothing(case: Case, bad: str, runs: list) -> None:
    """Whichever rank meets it: no weight, no moment, no average, and no place in the schedule."""
    for rank in range(RANKS):
        found = runs[rank][case]
        report = found[f"{bad} report"]
        assert report.step["skipped"] == 1.0
        assert math.isfinite(report.sums["loss"]) == (rank == 0)
        assert not changed(found[f"{bad} state"], found["before"])
        assert found["before"]["steps"] == 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_goes_on_as_if_the_step_had_not_been(case: Case, runs: list) -> None:
    for rank in range(RANKS):
        found = runs[rank][case]
        assert [found[name].step["skipped"] for name in ("first", "last")] == [0.0, 0.0]
        assert len(changed(found["after"], found["before"])) > len(found["before"]) / 2
        assert not changed(found["after"], found["plain"])
