"""Groups and turns as requests: one call for the completions of a prompt, and only new tokens for a later turn.

Covers `trueline.rollout.engine.RequestBook` and how `EnginePool` calls it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from trueline.data.pictures import Shown
from trueline.data.types import Completion
from trueline.rollout import engine as engines
from trueline.rollout.engine import NextTurn, RequestBook, RolloutEngine, SamplingParams
from trueline.rollout.pool import EnginePool, RolloutKey, SequencePlace
from trueline.runtime.actors import ActorDeath, LocalActor

PARAMS = SamplingParams(1.0, 4, ())


class Counting(RolloutEngine):
    """Returns the sum of its prompt after as many turns of the loop as the seed says; -1 never ends."""

    def __init__(self) -> None:
        self.book = RequestBook(self.generate)
        self.prompts: list[list[int]] = []
        self.ended: list[str] = []
        self.failing = ""

    async def generate(
        self, tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
    ) -> Completion:
        self.prompts.append(tokens)
        try:
            if params.seed == -1:
                await asyncio.Event().wait()
            for _ in range(params.seed or 0):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.ended.append(request)
            raise
        if request == self.failing:
            raise ActorDeath("engine: its process died")
        return Completion.of([sum(tokens), params.seed or 0], [-1.0, -1.0], 0, "stop")


class Recording(LocalActor[RolloutEngine]):
    def __init__(self, engine: Counting) -> None:
        super().__init__("engine", engine)
        self.engine, self.calls = engine, list[tuple[str, Any]]()

    async def call(self, method: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **named: Any) -> Any:
        self.calls.append((method.__name__, args))
        return await super().call(method, *args, **named)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(1.0, 4, (), seed)


async def ask(pool: EnginePool, seeds: list[int], group: int = 0) -> list[Completion]:
    keys = [RolloutKey(group, index) for index in range(len(seeds))]
    calls = (pool.generate([1, 2], seeded(seed), key) for seed, key in zip(seeds, keys, strict=True))
    return list(await asyncio.gather(*calls))


def test_a_group_is_one_call_and_each_gets_its_own_completion() -> None:
    actor = Recording(Counting())
    found = asyncio.run(ask(EnginePool([actor], takes_groups=True), [3, 3, 3, 3]))
    assert actor.names() == ["generate_group"]
    _, (name, tokens, requests, _) = actor.calls[0]
    assert (name, tokens, [request for request, _ in requests]) == ("train-0-0-0", [1, 2], [
        "train-0-0-0", "train-0-1-0", "train-0-2-0", "train-0-3-0",
    ])  # fmt: skip
    assert [one.tokens.tolist() for one in found] == [[3, 3]] * 4
    assert not actor.engine.book.groups


def test_completions_that_end_early_are_handed_out_early_in_few_calls() -> None:
    """Half of the group, then half of the rest, and so on: rewards and tools need not wait for the longest."""
    actor, ends = Recording(Counting()), list[int]()

    async def each(pool: EnginePool, index: int, seed: int) -> None:
        completion = await pool.generate([1, 2], seeded(seed), RolloutKey(0, index))
        assert completion.tokens[1] == seed
        ends.append(seed)

    async def all_of_them() -> None:
        pool = EnginePool([actor], takes_groups=True)
        await asyncio.gather(*(each(pool, index, seed) for index, seed in enumerate([400, 10, 20, 200, 30, 40, 90, 5])))

    asyncio.run(all_of_them())
    assert actor.names() == ["generate_group", *["collect_group"] * 3]
    assert sorted(ends[:4]) == [5, 10, 20, 30] and ends[-1] == 400 and not actor.engine.book.groups


def test_prompts_of_one_group_that_differ_are_calls_of_their_own() -> None:
    actor = Recording(Counting())

    async def both(pool: EnginePool) -> list[Completion]:
        calls = [pool.generate([index, 2], seeded(1), RolloutKey(0, index)) for index in range(2)]
        return list(await asyncio.gather(*calls))

    assert [one.tokens[0] for one in asyncio.run(both(EnginePool([actor], takes_groups=True)))] == [2, 3]
    assert actor.names() == ["generate_group"] * 2


def test_a_group_that_nobody_waits_for_is_ended_in_the_engine() -> None:
    actor = Recording(Counting())

    async def give_up(first: int) -> None:
        pool = EnginePool([actor], takes_groups=True)
        task = asyncio.create_task(ask(pool, [first, -1, -1, -1]))
        for _ in range(60):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.run(give_up(-1))
    assert sorted(actor.engine.ended) == [f"train-0-{index}-0" for index in range(4)]
    actor.engine.ended.clear()
    asyncio.run(give_up(1))  # one has ended, and the others go on: less than half
    assert sorted(actor.engine.ended) == [f"train-0-{index}-0" for index in range(1, 4)]
    assert not actor.engine.book.groups


def test_an_engine_that_dies_under_a_group_is_lost_once_and_another_takes_it_over() -> None:
    first, second = Recording(Counting()), Recording(Counting())
    first.engine.failing = "train-0-1-0"
    pool = EnginePool([first, second], takes_groups=True)
    found = asyncio.run(ask(pool, [4, 3, 2]))
    assert [one.tokens[1] for one in found] == [4, 3, 2]
    assert list(pool.lost) == [0] and set(second.names()) <= {"generate_group", "collect_group"}


def test_an_error_of_an_engine_reaches_every_completion_that_waits() -> None:
    class Broken(Counting):
        async def generate(
            self, tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
        ) -> Completion:
            raise ValueError("a token outside the vocabulary")

    with pytest.raises(ValueError, match="outside the vocabulary"):
        asyncio.run(ask(EnginePool([Recording(Broken())], takes_groups=True), [1, 2]))


async def talk(pool: EnginePool, turns: int, key: RolloutKey, number: int = 0) -> list[int]:
    """Take turns: every observation is one more token."""
    tokens, known = [1, 2], 0
    for turn in range(turns):
        completion = await pool.generate(list(tokens), PARAMS, key, turn, SequencePlace(number, known))
        tokens += completion.tokens.tolist()
        known = len(tokens)
        tokens.append(7)
    return tokens[:-1]


def test_a_later_turn_sends_only_its_new_tokens() -> None:
    actor = Recording(Counting())
    pool = EnginePool([actor], takes_groups=True)

    async def episode() -> list[int]:
        with pool.keep_group(0):
            return await talk(pool, 3, RolloutKey(0, 0))

    tokens = asyncio.run(episode())
    sent = [(args[0].known, args[0].new) for _, args in actor.calls]
    assert sent == [(0, [1, 2]), (4, [7]), (7, [7])]
    assert actor.engine.prompts == [[1, 2], [1, 2, 3, 0, 7], [1, 2, 3, 0, 7, 13, 0, 7]]
    assert tokens == [1, 2, 3, 0, 7, 13, 0, 7, 33, 0]
    assert not pool.holders  # the episode has ended


def test_a_sequence_that_a_stop_string_cut_short_continues_from_there() -> None:
    actor = Recording(Counting())
    pool = EnginePool([actor], takes_groups=True)

    async def cut() -> Completion:
        with pool.keep_group(0):
            await pool.generate([1, 2], PARAMS, RolloutKey(0, 0), 0, SequencePlace(0, 0))
            return await pool.generate([1, 2, 3, 9], PARAMS, RolloutKey(0, 0), 1, SequencePlace(0, 3))

    asyncio.run(cut())
    assert actor.engine.prompts[1] == [1, 2, 3, 9]


def test_an_engine_that_does_not_know_a_sequence_gets_all_of_it() -> None:
    """It has forgotten it, or it is another process, or another engine."""
    actor = Recording(Counting())
    pool = EnginePool([actor], takes_groups=True)

    async def forgotten() -> list[int]:
        with pool.keep_group(0):
            await talk(pool, 1, RolloutKey(0, 0))
            actor.engine.book.sequences.clear()
            await pool.generate([1, 2, 3, 0, 7], PARAMS, RolloutKey(0, 0), 1, SequencePlace(0, 4))
            pool.incarnations[0] += 1
            await pool.generate([1, 2, 3, 0, 7, 8], PARAMS, RolloutKey(0, 0), 2, SequencePlace(0, 5))
        return []

    asyncio.run(forgotten())
    assert actor.engine.prompts == [[1, 2], [1, 2, 3, 0, 7], [1, 2, 3, 0, 7, 8]]
    assert [args[0].known for _, args in actor.calls] == [0, 4, 0, 0]


def test_an_engine_forgets_the_sequences_used_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MOST_REMEMBERED", 11)
    engine = Counting()

    async def turns() -> list[Completion | None]:
        for name in ("a", "b", "c"):
            await engine.book.turn(NextTurn(name, 0, [1, 2]), PARAMS, name)
        return [await engine.book.turn(NextTurn(name, 4, [5]), PARAMS, name) for name in ("a", "b", "c")]

    a, b, c = asyncio.run(turns())
    assert a is None and b is not None and c is not None
    assert engine.book.tokens == sum(map(len, engine.book.sequences.values()))
    assert all(tokens.dtype == np.int32 for tokens in engine.book.sequences.values())
