"""One gradient, however the work is divided: packed, padded or sharing prefixes, over data, ring and tensor ranks.

Covers `trueline.training.engines.deepspeed_engine` and `trueline.training.engines.fsdp2_engine`.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.engines import ENGINES, FSDP2, ZERO
from tests.support.ranks import run_ranks, started
from tests.support.tiny import add_targets, make_samples, make_tiny_model
from trueline.algorithms.importance_sampling import EXCESS, VARIANCE
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.config.supervised import KTOConfig, PreferenceConfig
from trueline.data.batching import Budget, find_families, pack_samples, plan_micro_batches
from trueline.data.types import Sample
from trueline.training.group import TOTALS
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

SAMPLES, SHARED = 10, 34  # five pairs, of which two begin with the same tokens
FROZEN_RATE = 1e-12  # moves no float32 weight, so that many gradients can be taken of one model
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """How the work is divided."""

    engine: str = "zero2"
    packing: bool = True
    ring: int = 1
    tensor: int = 1
    checkpointing: bool = False
    tied: bool = True
    rows: int | None = None  # sequences per pass
    world: int = 1
    shares: bool = False  # common prefixes are computed once
    parts: int = 1  # of the minibatch, one after the other before the step

    def name(self) -> str:
        parts = [self.engine, f"ranks{self.world}", f"ring{self.ring}", f"tensor{self.tensor}"]
        flags = {"padded": not self.packing, "checkpointing": self.checkpointing, "untied": not self.tied}
        flags["shared"] = self.shares
        flags[f"parts{self.parts}"] = self.parts > 1
        return "-".join([*parts, *(flag for flag, on in flags.items() if on), f"rows{self.rows}"])


POLICY = AlgorithmConfig.parse(
    {
        "preset": "grpo",
        "kl": {"coefficient": 0.1},
        "entropy_coefficient": 0.01,
        "distillation": {"coefficient": 0.3, "divergence": "jsd"},
    }
)
LOSSES: dict[str, tuple[int, LossSettings]] = {  # loss -> neighbours that stay together, settings
    "policy": (1, LossSettings(0.8, POLICY, draws=True)),
    "sft": (1, LossSettings()),
    "preference": (2, LossSettings(1.0, PreferenceConfig(nll_coefficient=0.5))),
    "kto": (1, LossSettings(1.0, KTOConfig(desirable_weight=1.5), {"kto/kl": 0.25})),
}
BASE = Case("torch", packing=False)
ONE = (*ZERO, "fsdp2")  # on one rank FSDP2 shards nothing, whatever its keys
ALONE = [
    BASE,
    Case("torch"),
    *(Case("torch", rows=rows) for rows in (2, 4)),
    *(Case(engine, rows=2) for engine in ONE),
    *(Case(engine, rows=2, parts=2) for engine in ONE),
    Case("torch", parts=3),
    Case("torch", checkpointing=True),
    Case("torch", packing=False, checkpointing=True, rows=4),
    Case("torch", packing=False, tied=False),
    Case("torch", tied=False, checkpointing=True, rows=2),
    *(Case("torch", checkpointing=again, rows=3 - again, shares=True) for again in (False, True)),
    *(Case(engine, shares=True) for engine in ("zero3", "fsdp2")),
    Case("fsdp2", packing=False, tied=False, checkpointing=True, rows=4),
]
WIDE = (*ZERO, *FSDP2)
PAIR = [
    *(Case(engine, rows=rows, world=2) for engine in WIDE for rows in (None, 2)),
    *(Case(engine, ring=2, rows=rows, world=2) for engine in (*ZERO, "fsdp2") for rows in (None, 2)),
    *(Case(engine, ring=2, rows=2, world=2) for engine in FSDP2 if engine != "fsdp2"),
    *(Case(engine, rows=2, world=2, parts=3) for engine in WIDE),
    *(Case(engine, ring=2, checkpointing=True, world=2) for engine in ("zero3", "fsdp2")),
    *(Case(engine, packing=False, rows=2, world=2) for engine in ("zero3", "fsdp2")),
    *(Case(engine, rows=rows, world=2, shares=True) for engine in (*ZERO, "fsdp2") for rows in (None, 4)),
    *(Case(engine, checkpointing=True, world=2, shares=True) for engine in ("zero3", "fsdp2")),
    *(Case("fsdp2", tied=False, rows=rows, world=2) for rows in (None, 2)),
]
PAIR_CUT = [
    Case(engine, tensor=2, tied=tied, rows=rows, world=2)
    for engine in (*ZERO, "fsdp2")
    for tied, rows in ((True, 2), (False, None))
] + [Case(engine, tensor=2, world=2, shares=True) for engine in ("zero3", "fsdp2")]
FOUR = [
    *(Case(engine, ring=4, world=4) for engine in ("zero0", "zero2", "zero3", "fsdp2")),
    *(Case(engine, ring=2, rows=2, world=4) for engine in ("zero3", "fsdp2", "fsdp2-copies")),
    Case("fsdp2-copies", rows=2, world=4, parts=3),
]
FOUR_CUT = [Case(engine, ring=2, tensor=2, rows=2, world=4) for engine in ("zero1", "zero3", "fsdp2", "fsdp2-copies")]


def minibatch() -> list[Sample]:
    samples = make_samples(SAMPLES, seed=5, longest=40, shared=SHARED)
    for number, sample in enumerate(samples):
        sample.label = float(number % 3 == 0)
    return samples


def take_gradients(rank: int, world: int, models: dict[bool, str], cases: list[Case]) -> dict[Any, Any]:
    found = {}
    for case in cases:
        model = ModelConfig(
            path=models[case.tied],
            dtype="float32",
            context_parallel=case.ring,
            tensor_parallel=case.tensor,
            gradient_checkpointing=case.checkpointing,
            head_chunk_tokens=7,
        )
        training = TrainingConfig.parse(ENGINES[case.engine] | {"learning_rate": FROZEN_RATE, "packing": case.packing})
        worker = started(Worker(WorkerSpec(model, training, rank, world, 100, 0)))
        for loss, (samples_per_row, settings) in LOSSES.items():
            samples = minibatch()
            if loss == "policy":
                add_targets(samples)
            set_weights(samples, "token_mean" if loss in ("sft", "policy") else "sequence_sum", 0)
            totals: dict[str, float] = {}
            for number, part in enumerate(parts_of(samples, case.parts), 1):
                more = replace(settings, then="step" if number == case.parts else "more")
                for name, value in accumulate(worker, case, part, loss, samples_per_row, more).items():
                    totals[name] = totals.get(name, 0.0) + value
            gradients = worker.gradients()
            found[case, loss] = totals, gradients
            worker.engine.scale_gradients(0.25)
            norm = np.sqrt(sum(np.square(tensor).sum() for tensor in gradients.values()))
            assert worker.engine.step()["grad_norm"] == pytest.approx(norm / 4, rel=1e-4)
    return found


def parts_of(samples: list[Sample], count: int) -> list[list[Sample]]:
    """Divide samples; pairs stay together."""
    size = 2 * -(-len(samples) // (2 * count))
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def accumulate(
    worker: Worker, case: Case, samples: list[Sample], loss: str, together: int, settings: LossSettings
) -> dict[str, float]:
    mesh, lengths = worker.spec.mesh(), [sample.length() for sample in samples]
    kin = find_families([sample.tokens.numpy() for sample in samples]) if case.shares else []
    plan = plan_micro_batches(lengths, mesh.data, Budget(10_000, case.rows, case.packing), together, kin)
    assert (plan.saved > 0.2) == case.shares
    packed = pack_samples(samples, shares=case.shares)
    report = worker.accumulate(packed, plan[mesh.data_place(worker.rank)], loss, settings)
    return {name: value for name, value in report.sums.items() if name in TOTALS}


GROUPS = (ALONE, PAIR, PAIR_CUT, FOUR, FOUR_CUT)
Gradients = dict[str, np.ndarray]
Found = tuple[dict[str, float], Gradients]  # sums, with that of the loss among them


class Divisions:
    """Take the gradients of all cases of a group in processes of its own, once one of them is asked for.

    A process whose DeepSpeed has once cut matrices cannot train uncut ones, so those cases run apart.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = {tied: str(make_tiny_model(folder / f"model-{tied}", tied=tied)) for tied in (True, False)}
        self.found: dict[tuple[Case, str], Found] = {}

    def gradient(self, case: Case, loss: str) -> Found:
        """Return loss and draws summed over data places, and the gradient of every tensor."""
        if (case, loss) not in self.found:
            number, cases = next((number, group) for number, group in enumerate(GROUPS) if case in group)
            ranks = run_ranks(take_gradients, cases[0].world, self.folder / str(number), self.models, cases)
            self.found |= {key: joined(key[0], [results[key] for results in ranks]) for key in ranks[0]}
        return self.found[case, loss]


def joined(case: Case, results: list[Found]) -> Found:
    """Add the sums of data places up; every rank has the same gradient."""
    tensors = results[0][1]
    for _, others in results[1:]:
        assert all(np.allclose(others[name], tensors[name], rtol=1e-5, atol=1e-8) for name in tensors)
    places = [sums for sums, _ in results[:: case.ring * case.tensor]]
    return {name: sum(sums[name] for sums in places) for name in places[0]}, tensors


@pytest.fixture(scope="module")
def divisions(tmp_path_factory: pytest.TempPathFactory) -> Divisions:
    return Divisions(tmp_path_factory.mktemp("gradients"))


EVERY = [
    *ALONE,
    *(pytest.param(case, marks=pytest.mark.slow) for case in (*PAIR, *PAIR_CUT)),
    *(pytest.param(case, marks=pytest.mark.soak) for case in (*FOUR, *FOUR_CUT)),
]


@pytest.mark.parametrize("case", EVERY, ids=Case.name)
def test_gradient_does_not_depend_on_the_division(case: Case, divisions: Divisions) -> None:
    """1e-5 on the loss, and on the relative L2 distance of each gradient tensor."""
    base = replace(BASE, tied=case.tied)
    for loss in LOSSES:
        expected_sums, expected = divisions.gradient(base, loss)
        found_sums, found = divisions.gradient(case, loss)
        assert found_sums == pytest.approx(expected_sums, rel=TOLERANCE, abs=TOLERANCE), loss
        assert (EXCESS in found_sums) == (VARIANCE in found_sums) == (loss == "policy")
        assert set(found) == set(expected)
        for name, tensor in found.items():
            distance = np.linalg.norm(tensor - expected[name]) / np.linalg.norm(expected[name])
            assert distance < TOLERANCE, f"{loss}, {name}: {distance:.2e}"
