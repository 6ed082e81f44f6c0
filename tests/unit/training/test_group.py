from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.stored import store_samples
from tests.support.tiny import make_samples
from trueline.config.model import RanksConfig
from trueline.data.batching import FILLER, Plan, collate
from trueline.data.types import Batch, LossOutput, Sample
from trueline.models.ring_attention import Mesh
from trueline.runtime.actors import LocalActor, Stored
from trueline.training.group import ModelGroup, reduce_reports
from trueline.training.report import LossAccumulator, Report
from trueline.training.samples import RankSamples, SampleBlock, StoredSamples


class Echo:
    """A rank that scores each token with its own number."""

    def score(self, packed: Any, passes: list[list[int]], *_: Any) -> Any:
        starts = packed.lengths.cumsum() - packed.lengths
        rows = [at for micro_batch in passes for at in micro_batch if at >= 0]
        pieces = [packed.arrays["tokens"][starts[at] : starts[at] + packed.lengths[at]] for at in rows]
        return np.concatenate([np.zeros(0), *pieces]).astype(np.float32)


class Reader:
    """A rank that reads all its passes, and keeps what it was sent."""

    def score_kept(self, packed: RankSamples, passes: list[list[int]], names: tuple[str, ...], *_: Any) -> Any:
        self.sent = packed
        batches = [(some, collate(packed, some, torch.device("cpu"))) for some in passes]
        read = [batch.tokens for some, batch in batches if FILLER not in some]
        return None, {names[0]: torch.cat([torch.zeros(0), *read]).numpy()}


FIELD: dict[str, Callable[[Sample], Any]] = {
    "tokens": lambda one: one.tokens,
    "mask": lambda one: one.mask,
    "token_rewards": lambda one: one.mask.float(),
}


def in_blocks(samples: list[Sample], size: int) -> StoredSamples:
    """Store so many samples in each block, and what no loss reads in blocks of its own."""
    whole = store_samples(samples)
    blocks = []
    for start in range(0, len(samples), size):
        places = tuple(range(start, min(start + size, len(samples))))
        for names in (("tokens", "mask"), ("token_rewards",)):
            arrays = {name: np.concatenate([FIELD[name](samples[at]) for at in places]) for name in names}
            blocks.append(SampleBlock(names, places, Stored(arrays)))
    return replace(whole, fields=replace(whole.fields, blocks=blocks))


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(3), Mesh(4, ring=2), Mesh(4, tensor=2)])
@pytest.mark.parametrize("count", [1, 2, 11])
def test_each_rank_is_sent_references_to_its_own_samples_alone(mesh: Mesh, count: int) -> None:
    samples, readers = make_samples(count), [Reader() for _ in range(mesh.world)]
    stored = in_blocks(samples, size=1)
    actors = [LocalActor(f"rank-{rank}", reader) for rank, reader in enumerate(readers)]
    group = ModelGroup("model", actors, RanksConfig(micro_batch_tokens=30), 60, mesh)
    for block in group.score_stored(stored, "ref_logprobs"):
        stored.add(block)
    assert all(np.array_equal(stored.part("ref_logprobs", at), one.tokens) for at, one in enumerate(samples))
    passes = group.plan(stored)
    for rank, reader in enumerate(readers):
        own = {at for micro_batch in passes[mesh.data_place(rank)] for at in micro_batch}
        sent = [(block.names, number) for block in reader.sent.fields.blocks for number in block.samples]
        assert sorted(sent) == [(("tokens", "mask"), number) for number in sorted({max(at, 0) for at in own})]


def test_a_field_that_is_added_again_replaces_what_was_read() -> None:
    stored = store_samples(make_samples(2))
    for value in (1.0, 2.0):
        arrays = {"entropy": np.full(sum(row.length for row in stored.rows), value, np.float32)}
        stored.add(SampleBlock(("entropy",), (0, 1), Stored(arrays)))
        assert set(stored.part("entropy", 1)) == {value}


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


@pytest.mark.parametrize("local", [True, False])
def test_samples_are_put_into_the_store_once_ranks_of_other_processes_read_them(
    local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Any] = []
    monkeypatch.setattr(Stored, "share", lambda self: moved.append(self))
    anywhere: Any = LocalActor("policy", object()) if local else object()
    group = ModelGroup("policy", [anywhere], RanksConfig(micro_batch_tokens=99), 60.0, Mesh(1))
    stored = store_samples([Sample(torch.arange(4), torch.ones(4, dtype=torch.bool)) for _ in range(2)])
    group._readers(stored, Plan([[[0, 1]]]))
    assert moved == ([] if local else [stored.fields.blocks[0].arrays])
