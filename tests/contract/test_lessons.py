"""What a model says as a teacher: the same on any engine and ranks, with its live and its averaged weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.engines import ENGINES
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples, make_tiny_model
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import Budget, pack_samples, plan_micro_batches
from trueline.data.types import NO_TARGET, TARGETS
from trueline.training.report import Asked, LossSettings
from trueline.training.worker import Worker, WorkerSpec

NAMES, DECAY = ("teacher_logprobs", *TARGETS), 0.75
ALONE = [("torch", 1, True), ("torch", 1, False)]
PAIR = [(engine, ring, True) for engine in ("zero3", "fsdp2") for ring in (1, 2)]
PAIR += [("zero2", 1, True), ("fsdp2", 1, False)]
Case = tuple[str, int, bool]


def teach(rank: int, world: int, path: str, cases: list[Case], dtype: str) -> dict[Case, Any]:
    """What ranks say before an update, after it by both weights, and by the live ones once more."""
    found: dict[Case, Any] = {}
    samples = make_samples(6, seed=3, longest=20)
    set_weights(samples, "token_mean", 0)
    for case in cases:
        engine, ring, packing = case
        keys = {"learning_rate": 2e-4, "ema_decay": DECAY, "packing": packing, "max_grad_norm": 0.0}
        model = ModelConfig(path=path, dtype=dtype, context_parallel=ring, head_chunk_tokens=7)  # type: ignore[arg-type]
        worker = started(Worker(WorkerSpec(model, TrainingConfig.parse(ENGINES[engine] | keys), rank, world, 9, 0)))
        mesh, lengths = worker.spec.mesh(), [sample.length() for sample in samples]
        passes = plan_micro_batches(lengths, mesh.data, Budget(10_000, 2, packing))[mesh.data_place(rank)]
        packed, asked = pack_samples(samples), Asked(NAMES, 4, 0.8, "live")

        def say(weights: Any, worker: Worker = worker, given: Any = (packed, passes, asked)) -> Any:
            _, arrays = worker.score_targets(given[0], given[1], replace_weights(given[2], weights))
            order = [at for some in given[1] for at in some if at >= 0]
            cuts = np.cumsum([samples[at].length() for at in order])[:-1]
            parts = {name: np.split(array, cuts) for name, array in arrays.items()}
            return {at: {name: some[place] for name, some in parts.items()} for place, at in enumerate(order)}

        before = say("live")
        worker.update(packed, passes, "sft", LossSettings())
        sums = worker.fingerprints()
        after, average, again = say("live"), say("average"), say("live")
        assert worker.fingerprints() == sums
        found[case] = {"before": before, "after": after, "average": average, "again": again}
    return found


def replace_weights(asked: Asked, weights: Any) -> Asked:
    return asked._replace(weights=weights)


def joined(ranks: list[dict[Case, Any]]) -> dict[Case, Any]:
    """The samples of all data places."""
    every = ranks[0]
    for other in ranks[1:]:
        for case, moments in other.items():
            for moment, samples in moments.items():
                every[case][moment] |= samples
    return every


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Any]:
    folder = tmp_path_factory.mktemp("teachers")
    path = str(make_tiny_model(folder / "model", tied=True))
    alone, pair = (
        joined(run_ranks(teach, world, folder / str(world), path, cases, "float32"))
        for world, cases in ((1, ALONE), (2, PAIR))
    )
    return alone | pair


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ALONE[1:], *PAIR], ids=str)
def test_ranks_say_what_one_process_says(case: Case, said: dict[Case, Any]) -> None:
    for moment, close in (("before", 1e-5), ("after", 1e-3), ("average", 1e-3)):
        for at, expected in said[ALONE[0]][moment].items():
            found = said[case][moment][at]
            for name in (NAMES[0], NAMES[2]):
                np.testing.assert_allclose(found[name], expected[name], atol=close, err_msg=f"{moment} {name}")
            if moment == "before":
                assert (found[NAMES[1]] == expected[NAMES[1]]).all()


@pytest.mark.parametrize("case", [*ALONE, *PAIR], ids=str)
def test_the_average_is_that_of_the_weights_and_leaves_them_as_they_were(case: Case, said: dict[Case, Any]) -> None:
    """An average of 3/4 of the first and 1/4 of the second weights says more of what the first ones said."""
    moments = said[case]
    for at, live in moments["after"].items():
        for name, array in live.items():
            assert (array == moments["again"][at][name]).all()
        mask = live["target_ids"][:, 0] != NO_TARGET
        assert mask.any()
        first, average, last = (moments[one][at][NAMES[0]][mask] for one in ("before", "average", "after"))
        moved, part = np.abs(last - first).mean(), np.abs(average - first).mean()
        assert 0.1 * moved < part < 0.45 * moved


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3", "fsdp2"])
def test_rounded_weights_are_the_same_after_the_average(engine: str, tmp_path: Path) -> None:
    """In bfloat16, masters are others than the weights that compute."""
    path = str(make_tiny_model(tmp_path / "model", tied=True))
    case = (engine, 1, True)
    moments = joined(run_ranks(teach, 2, tmp_path / "ranks", path, [case], "bfloat16"))[case]
    for at, live in moments["after"].items():
        assert all((array == moments["again"][at][name]).all() for name, array in live.items())
    differ = [(moments["average"][at][NAMES[0]] != live[NAMES[0]]).any() for at, live in moments["after"].items()]
    assert any(differ)
