from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import make_samples
from trueline.config.model import RanksConfig
from trueline.data.types import Batch, LossOutput, Sample
from trueline.models.ring_attention import Mesh
from trueline.runtime.actors import LocalActor
from trueline.training.group import ModelGroup, reduce_reports
from trueline.training.report import LossAccumulator, Report


class Echo:
    """A rank that scores each token with its own number."""

    def score(self, packed: Any, passes: list[list[int]], *_: Any) -> Any:
        starts = packed.lengths.cumsum() - packed.lengths
        rows = [at for micro_batch in passes for at in micro_batch if at >= 0]
        pieces = [packed.arrays["tokens"][starts[at] : starts[at] + packed.lengths[at]] for at in rows]
        return np.concatenate([np.zeros(0), *pieces]).astype(np.float32)


def make_group(mesh: Mesh, tokens: int = 30) -> ModelGroup:
    actors = [LocalActor(f"rank-{rank}", Echo()) for rank in range(mesh.world)]
    return ModelGroup("model", actors, RanksConfig(micro_batch_tokens=tokens), 60, mesh)


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(3), Mesh(4, ring=2), Mesh(4, tensor=2), Mesh(8, 2, 2)])
@pytest.mark.parametrize("count", [1, 2, 11])
def test_scores_find_their_samples_on_any_mesh(mesh: Mesh, count: int) -> None:
    samples: list[Sample] = make_samples(count)
    found = make_group(mesh).score(samples)
    assert all(torch.equal(one, sample.tokens.float()) for one, sample in zip(found, samples, strict=True))


def test_a_ring_has_room_for_longer_sequences() -> None:
    assert make_group(Mesh(4, ring=4), tokens=30).budget.tokens == 120
    assert make_group(Mesh(4, tensor=4), tokens=30).budget.tokens == 30


def test_reports_are_joined_by_weight() -> None:
    one = Report({"loss": 0.2, "weight": 0.25, "accuracy": 0.25}, {"ratio": 1.5}, {"grad_norm": 2.0})
    two = Report({"loss": 0.4, "weight": 0.75, "accuracy": 0.0}, {"ratio": 3.5}, {"grad_norm": 2.0})
    expected = {"loss": 0.6, "accuracy": 0.25, "ratio": 3.5, "grad_norm": 2.0}
    assert reduce_reports([one, two]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("world", "ring", "tensor"), [(1, 1, 1), (8, 1, 1), (8, 2, 1), (8, 1, 4), (8, 2, 2), (12, 3, 2)]
)
def test_every_rank_has_one_place(world: int, ring: int, tensor: int) -> None:
    mesh = Mesh(world, ring, tensor)
    assert mesh.data * mesh.width == world
    rings = [mesh.ring_ranks(data, place) for data in range(mesh.data) for place in range(tensor)]
    assert sorted(rank for ranks in rings for rank in ranks) == list(range(world))
    for ranks in rings:
        assert len(ranks) == ring
        assert len({mesh.data_place(rank) for rank in ranks}) == 1  # a ring shares its samples


def test_tensor_ranks_are_neighbours_and_data_is_outermost() -> None:
    mesh = Mesh(8, ring=2, tensor=2)
    assert [mesh.data_place(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (mesh.ring_ranks(0, 0), mesh.ring_ranks(0, 1), mesh.ring_ranks(1, 0)) == ([0, 2], [1, 3], [4, 6])


def test_without_a_ring_nobody_is_joined() -> None:
    assert Mesh(4).join_ring(0) is None


def batch(share: float) -> Batch:
    """Two sequences of two tokens, of which the second is learnt; the last sequence fills up and weighs nothing."""
    mask = torch.tensor([False, True, False, True])
    return Batch(torch.arange(4), mask, [2, 2], torch.tensor([share, 0.0]), torch.zeros(2))


def loss(value: float, largest: float) -> LossOutput:
    values = torch.tensor([9.0, value, 9.0, 9.0])
    return LossOutput(values, {"mean": 10 * values}, {"largest": torch.tensor([99.0, largest, 99.0, 99.0])})


def test_passes_add_up_and_maxima_are_those_of_tokens_that_count() -> None:
    tally = LossAccumulator()
    for value, largest, share in ((1.0, 5.0, 0.25), (2.0, 3.0, 0.75)):
        tally.add(loss(value, largest), batch(share))
    report = tally.report()
    assert report.sums == pytest.approx({"mean": 10 * 1.75, "loss": 1.75, "weight": 1.0})
    assert report.maxima == {"largest": 5.0}
