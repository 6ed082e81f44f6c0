import pytest

from trueline.runtime.fingerprints import ADAPTERS, LiveSums
from trueline.sync.proof import EngineProof, Sums, SyncFailure


def held(weights: int, adapters: int) -> Sums:
    return [[{"a": weights, "b": 1, ADAPTERS: adapters}]]


def proof() -> EngineProof:
    made = EngineProof([[{"a": (1, 4), "b": (2, 4)}]], adapter_only=True)
    made.start(LiveSums(11, 5), held(10, 5))
    return made


def test_adapters_that_stand_apart_have_a_sum_of_their_own() -> None:
    made = proof()
    made.check_sum(LiveSums(adapters=7), held(10, 7))  # weights stay as they were loaded, adapters do not
    with pytest.raises(SyncFailure, match="engine 0 holds other adapters than the trainer"):
        made.check_sum(LiveSums(adapters=7), held(10, 5))
    with pytest.raises(SyncFailure, match="engine 0 holds other weights than the trainer"):
        made.check_sum(LiveSums(adapters=7), held(12, 7))
    assert made.limits("") == ["only adapters are sent"]


def test_wrong_adapters_or_weights_are_noticed_at_the_start() -> None:
    made = EngineProof([[{"a": (1, 4), "b": (2, 4)}]], adapter_only=True)
    with pytest.raises(SyncFailure, match="other adapters"):
        made.start(LiveSums(11, 5), held(10, 6))
    with pytest.raises(SyncFailure, match="other weights than the trainer at the start"):
        made.start(LiveSums(11, 5), held(9, 5))


def test_adapters_divided_among_processes_are_left_out_of_every_sum() -> None:
    made = EngineProof([[{"a": (1, 4)}, {"a": (3, 4)}]], adapter_only=True)
    divided: Sums = [[{"a": 4, ADAPTERS: 1}, {"a": 6, ADAPTERS: 2}]]
    made.start(LiveSums(10, 5), divided)
    assert made.summed
    made.check_sum(LiveSums(adapters=9), divided)


def test_fixed_numbers_may_stand_among_an_engines_weights_or_not() -> None:
    for among in (0, 4):
        made = EngineProof([[{"a": (1, 4), "b": (2, 4)}]])
        made.start(LiveSums(11, 0, 4), held(10 + among, 0))
        assert made.summed
        made.check_sum(LiveSums(21, 0, 4), held(20 + among, 0))
        with pytest.raises(SyncFailure, match="engine 0 holds other weights than the trainer"):
            made.check_sum(LiveSums(21, 0, 4), held(24 - among, 0))
