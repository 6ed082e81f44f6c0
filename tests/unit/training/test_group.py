from typing import Any

import pytest
import torch

from tests.support.tiny import make_samples
from trueline.config.model import RanksConfig
from trueline.data.types import Sample
from trueline.runtime.actors import LocalActor
from trueline.training.group import ModelGroup, joined
from trueline.training.mesh import Mesh
from trueline.training.report import Report


class Echo:
    """A rank that scores each token with its own number."""

    def score(self, packed: Any, passes: list[list[int]], *_: Any) -> Any:
        starts = packed.lengths.cumsum() - packed.lengths
        rows = [at for micro_batch in passes for at in micro_batch if at >= 0]
        pieces = [packed.arrays["tokens"][starts[at] : starts[at] + packed.lengths[at]] for at in rows]
        return (
            torch.cat([torch.tensor(piece) for piece in pieces]).float().numpy() if pieces else torch.zeros(0).numpy()
        )


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
    assert joined([one, two]) == pytest.approx(expected)
