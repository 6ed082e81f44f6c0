"""Evaluation with an engine that says which answer it is, and a reward that looks it up."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from trueline.config.reward import RewardPartConfig
from trueline.config.rl import EvaluationConfig
from trueline.data.chat import ChatFormat
from trueline.data.types import Completion, Outcome, Prompt, Trajectory
from trueline.environments.single_turn import SingleTurn
from trueline.rewards.base import RewardFailure
from trueline.rewards.combined import CombinedReward
from trueline.rollout.answers import Answers, answer_seed
from trueline.rollout.engine import SamplingParams
from trueline.rollout.episode import Episodes
from trueline.rollout.evaluation import Evaluator, judged
from trueline.rollout.pass_at_k import Judged
from trueline.rollout.pool import EnginePool
from trueline.runtime.actors import ActorFailure
from trueline.runtime.event_loop import EventLoop

STOP = 2
PARAMS = SamplingParams(1.0, 8, (STOP,))
FAILS = None  # in a table of rewards


class IndexEngine:
    """The reply is the answer's index; every call is remembered."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.name, self.tokenizer = "engine", tokenizer
        self.requests: dict[str, tuple[str, int | None]] = {}  # -> prompt and seed
        self.running = self.most_running = 0
        self.delay: Callable[[str], float] = lambda prompt: 0.0

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        return await self.generate(*args)

    async def generate(self, tokens: list[int], params: SamplingParams, request: str) -> Completion:
        prompt = self.tokenizer.decode(tokens)
        assert request not in self.requests, "two requests have one name"
        self.requests[request] = (prompt, params.seed)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.delay(prompt))
        self.running -= 1
        answer = [*self.tokenizer(request.split("-")[2])["input_ids"], STOP]
        return Completion(answer, [-1.0] * len(answer), 0, "stop")

    def submit(self, method: Callable[..., Any], *args: Any) -> Any:
        raise NotImplementedError

    def stop(self) -> None:
        pass


class TableReward:
    """Row by the prompt's label, column by the reply."""

    def __init__(self, table: dict[str, list[float | None]]) -> None:
        self.table = table

    async def score(self, call: dict[str, Any]) -> float:
        reward = self.table[call["label"]][int(call["reply"])]
        if reward is FAILS:
            raise RewardFailure(f"no reward for {call['label']}")
        return reward

    async def stop(self) -> None:
        pass


def prompts(*labels: str) -> list[Prompt]:
    return [Prompt(number, [{"role": "user", "content": label}], label) for number, label in enumerate(labels)]


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop(timeout_seconds=10)
    yield made
    made.stop()


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerFast) -> IndexEngine:
    return IndexEngine(tokenizer)


@pytest.fixture
def episodes(engine: IndexEngine, tokenizer: PreTrainedTokenizerFast) -> Episodes:
    return Episodes(EnginePool([engine]), ChatFormat(tokenizer, use_template=False))


Table = dict[str, list[float | None]]


def evaluated(
    episodes: Episodes, loop: EventLoop, sets: dict[str, list[Prompt]], *tables: Table, samples: int = 1
) -> tuple[dict[str, float], list[Any]]:
    """With one reward for each table; the second one weighs 10."""
    parts = {
        ("reward", "second")[at]: (TableReward(table), RewardPartConfig(weight=(1.0, 10.0)[at]))
        for at, table in enumerate(tables)
    }
    config = EvaluationConfig(samples=samples, temperature=1.0)
    reward = CombinedReward(parts, 0.0)
    return Evaluator(episodes, lambda: SingleTurn(reward), sets, PARAMS, config, loop).run(seed=5)


def test_one_answer_to_each_prompt_of_one_set(episodes: Episodes, loop: EventLoop) -> None:
    """Of rewards 1 and 0: mean 0.5, half width 1.96 * sqrt(0.5) / sqrt(2) = 0.98; `0` and the end are two tokens."""
    table: Table = {"right": [1.0], "wrong": [0.0]}
    metrics, trajectories = evaluated(episodes, loop, {"": prompts("right", "wrong")}, table)
    assert metrics == pytest.approx(
        {
            "evaluation/reward": 0.5,
            "evaluation/reward_ci95": 0.98,
            "evaluation/answer_tokens": 2.0,
            "evaluation/failed_share": 0.0,
        }
    )
    assert [one.prompt.label for one in trajectories] == ["right", "wrong"]


def test_several_answers_have_numbers_at_k(episodes: Episodes, loop: EventLoop) -> None:
    table: Table = {"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [1.0, 1.0]}
    metrics, trajectories = evaluated(episodes, loop, {"": prompts("a", "b", "c")}, table, samples=2)
    wanted = {"reward": 0.5, "mean@2": 0.5, "pass@1": 0.5, "pass@2": 2 / 3, "maj@2": 2 / 3}  # ties: the first answer
    assert {name: metrics[f"evaluation/{name}"] for name in wanted} == pytest.approx(wanted)
    assert [one.reply for one in trajectories] == ["0", "1"] * 3


def test_failed_answers_are_counted_and_left_out(episodes: Episodes, loop: EventLoop) -> None:
    """The means of the prompts that have one are 1 and 0; a zero in place of each failure would give 0.25."""
    table: Table = {"a": [1.0, FAILS], "b": [0.0, 0.0], "c": [FAILS, FAILS]}
    metrics, trajectories = evaluated(episodes, loop, {"": prompts("a", "b", "c")}, table, samples=2)
    assert metrics["evaluation/reward"] == metrics["evaluation/maj@2"] == 0.5
    assert metrics["evaluation/pass@2"] == 0.0  # of b alone
    assert metrics["evaluation/failed_share"] == 0.5
    assert [one.outcome for one in trajectories].count(Outcome.REWARD_ERROR) == 3


def test_replies_and_rewards_stay_together_where_some_failed() -> None:
    (prompt,) = prompts("a")
    found = [("lost", FAILS), ("right", 1.0), ("lost too", FAILS), ("wrong", 0.0)]
    group = [Trajectory(prompt, 0, [], [], [], [], [], reward=reward, reply=reply) for reply, reward in found]
    assert judged(group) == Judged(["right", "wrong"], [1.0, 0.0])


def test_where_everything_failed_there_is_no_reward(episodes: Episodes, loop: EventLoop) -> None:
    metrics, _ = evaluated(episodes, loop, {"": prompts("a")}, {"a": [FAILS]})
    assert metrics == {"evaluation/answer_tokens": 2.0, "evaluation/failed_share": 1.0}


def test_sets_have_names_and_weigh_the_same(episodes: Episodes, loop: EventLoop) -> None:
    table: Table = {"a": [1.0], "b": [0.0], "c": [0.0]}
    metrics, trajectories = evaluated(episodes, loop, {"easy": prompts("a"), "hard": prompts("b", "c")}, table)
    assert metrics["evaluation/easy/reward"] == 1.0
    assert metrics["evaluation/hard/reward"] == 0.0
    assert metrics["evaluation/reward"] == 0.5
    assert "evaluation/easy/reward_ci95" not in metrics and "evaluation/hard/reward_ci95" in metrics
    assert [one.prompt.label for one in trajectories] == ["a", "b", "c"]


def test_several_rewards_are_told_apart(episodes: Episodes, loop: EventLoop) -> None:
    tables: list[Table] = [{"a": [1.0], "b": [0.0]}, {"a": [0.1], "b": [0.3]}]
    metrics, _ = evaluated(episodes, loop, {"": prompts("a", "b")}, *tables)
    assert metrics["evaluation/part/reward"] == 0.5
    assert metrics["evaluation/part/second"] == pytest.approx(0.2)
    assert metrics["evaluation/reward"] == pytest.approx(0.5 + 10 * 0.2)


def test_seeds_depend_on_the_prompts_place_in_its_set_and_on_the_answer(
    episodes: Episodes, engine: IndexEngine, loop: EventLoop
) -> None:
    table: Table = {label: [1.0, 1.0] for label in "abc"}
    evaluated(episodes, loop, {"": prompts("b", "c")}, table, samples=2)
    alone = set(engine.requests.values())
    assert len({seed for _, seed in alone}) == 4
    engine.requests.clear()
    evaluated(episodes, loop, {"other": prompts("a"), "same": prompts("b", "c")}, table, samples=2)
    assert alone < set(engine.requests.values())
    assert ("b", answer_seed(5, 0, 1)) in alone


def ask(episodes: Episodes, loop: EventLoop, samples: int = 2) -> Answers:
    reward = CombinedReward({"reward": (TableReward(dict.fromkeys("abcdefgh", [0.0] * 9)), RewardPartConfig())}, 0.0)
    return Answers(episodes, lambda: SingleTurn(reward), PARAMS, loop, samples, "test")


@pytest.mark.parametrize(("under_way", "most"), [(1, 2), (5, 4), (100, 16)])
def test_no_more_answers_are_under_way_than_allowed(
    episodes: Episodes, engine: IndexEngine, loop: EventLoop, under_way: int, most: int
) -> None:
    """Whole prompts of two answers, but at least one."""
    engine.delay = lambda prompt: 0.01
    places = [
        place for place, _ in ask(episodes, loop).to(enumerate(prompts(*"abcdefgh")), seed=0, under_way=under_way)
    ]
    assert sorted(places) == list(range(8))
    assert engine.most_running == most


def test_answers_come_as_they_are_done(episodes: Episodes, engine: IndexEngine, loop: EventLoop) -> None:
    engine.delay = lambda prompt: {"a": 0.2, "b": 0.1, "c": 0.0}[prompt]
    found = list(ask(episodes, loop).to(enumerate(prompts("a", "b", "c")), seed=None, under_way=100))
    assert [place for place, _ in found] == [2, 1, 0]
    assert [group[0].prompt.label for _, group in found] == ["c", "b", "a"]
    assert {seed for _, seed in engine.requests.values()} == {None}


def test_the_wait_for_one_prompt_is_bounded_not_that_for_all(episodes: Episodes, engine: IndexEngine) -> None:
    engine.delay = lambda prompt: 0.1
    loop = EventLoop(timeout_seconds=0.5)
    assert len(list(ask(episodes, loop).to(enumerate(prompts(*"abcdef")), seed=0, under_way=1))) == 6
    engine.delay = lambda prompt: 5.0
    engine.requests.clear()
    with pytest.raises(ActorFailure, match=r"sampling 2 answers .*timeout_seconds"):
        list(ask(episodes, loop).to(enumerate(prompts("a")), seed=0, under_way=1))
    loop.stop()


def test_an_engine_that_fails_is_heard(episodes: Episodes, engine: IndexEngine, loop: EventLoop) -> None:
    def broken(prompt: str) -> float:
        raise ConnectionError("engine lost")

    engine.delay = broken
    with pytest.raises(ConnectionError, match="engine lost"):
        list(ask(episodes, loop).to(enumerate(prompts("a")), seed=0, under_way=1))
