"""Pools of rows that rest: every course of a few verdicts, against a plain reading of the rules."""

import json
from dataclasses import asdict
from itertools import product

import pytest

from trueline.config.base import ConfigError
from trueline.config.data import DifficultyConfig
from trueline.config.rl import RLConfig
from trueline.monitoring.ledger import Ledger, Pools

RATES = {"easy": 0.75, "": 0.5, "hard": 0.25}  # at the bounds, and between them
CONFIG = DifficultyConfig(enabled=True, low=0.25, high=0.75, rest=2, longest_rest=5)


def visits(verdicts: tuple[str, ...]) -> list[int]:
    """Return the epochs in which a row with these verdicts, one per visit, is sampled: 2, 4, 5, 5, ... are skipped."""
    epoch, found, streak = 0, [], 0
    for at, verdict in enumerate(verdicts):
        found.append(epoch)
        streak = 0 if not verdict else streak + 1 if at and verdicts[at - 1] == verdict else 1
        epoch += 1 + (0, 2, 4, 5, 5)[streak]
    return found


@pytest.mark.parametrize("verdicts", list(product(RATES, repeat=4)))
def test_a_row_rests_as_its_verdicts_say(verdicts: tuple[str, ...]) -> None:
    ledger, left, found, fates = Ledger(), list(verdicts), [], list[str]()
    for epoch in range(visits(verdicts)[-1] + 1):
        ledger = Ledger.of(json.loads(json.dumps(asdict(ledger))))  # killed and resumed in every epoch
        if fate := ledger.pools.skip(7):
            fates.append(fate)
            continue
        found.append(epoch)
        ledger.pools.judge(7, RATES[left.pop(0)], CONFIG)
    assert found == visits(verdicts) and not left
    assert fates == [f"skipped_{verdicts[at]}" for at in range(3) for _ in range(found[at + 1] - found[at] - 1)]
    held = {name for name, pool in asdict(ledger.pools).items() if 7 in pool}
    assert held == ({verdicts[-1], "left"} if verdicts[-1] else set())  # others take no room


def test_a_verdict_of_a_group_drawn_before_a_rest_began_changes_or_ends_it() -> None:
    pools = Pools()
    for rate, expected in (0.0, Pools({}, {7: 2}, {7: 2})), (1.0, Pools({7: 2}, {}, {7: 2})), (0.5, Pools()):
        pools.judge(7, rate, CONFIG)
        assert pools == expected


def test_the_rest_that_would_end_first_ends_early() -> None:
    pools, woken = Pools({3: 4, 5: 1}, {9: 2, 2: 4}, {9: 2, 3: 2, 2: 3}), list[int]()
    while pools.left:
        woken.append(pools.next_awake())
        pools.wake(woken[-1])
    assert woken == [3, 9, 2] and not any(map(pools.skip, range(10)))
    pools.judge(3, 1.0, CONFIG)
    assert (pools.easy, pools.left) == ({3: 5, 5: 1}, {3: 5})  # a rest that ended early counts as one


def test_verdicts_of_steps_that_are_given_up_are_undone_and_their_skips_keep_their_fate() -> None:
    before = Ledger(drawn=2, fates={"trained": 2}, pools=Pools(hard={0: 2}, left={0: 2}))
    now = Ledger.of(json.loads(json.dumps(asdict(before))))
    assert now == before
    now.close([now.draw(0)], now.pools.skip(0))
    now.pools.judge(1, 0.0, CONFIG)
    now.close([now.draw(1)], "trained")
    assert now.pools == Pools(hard={0: 2, 1: 2}, left={0: 1, 1: 2})
    back = now.roll_back(before, [])
    assert back.pools == before.pools == Pools(hard={0: 2}, left={0: 2})
    assert back.balance() == "4 prompts sampled: 2 trained, 1 skipped hard, 1 rolled back"


def test_a_checkpoint_from_before_there_were_pools_has_none() -> None:
    assert Ledger.of({"drawn": 0, "under_way": {}, "fates": {}, "recent": {}}).pools == Pools()


REFUSED = {
    "difficulty.low=0.5 must be below high=0.5": ["data.difficulty.low=0.5", "data.difficulty.high=0.5"],
    "difficulty.rest=9 is above longest_rest=8": ["data.difficulty.rest=9"],
    "set algorithm.group_size to 2 or more": ["data.difficulty.enabled=true", "algorithm.group_size=1"],
    "set reward.function": ["data.difficulty.enabled=true", "reward.function="],
    "oversample=0.5: .* max_staleness=0 .*: set rollout.max_staleness=1": ["rollout.oversample=0.5"],
    "oversample=1.5: .* max_staleness=1 .*: set rollout.max_staleness=2": [
        "rollout.oversample=1.5",
        "rollout.max_staleness=1",
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused_with_the_way_out(message: str) -> None:
    words = ["model.path=m", "data.path=d.jsonl", "reward.function=exact"]
    with pytest.raises(ConfigError, match=message):
        RLConfig.load([], [*words, *REFUSED[message]])
