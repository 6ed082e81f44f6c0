"""Groups of completions: their seeds, and how many are under way."""

import numpy as np
import pytest

from tests.support.index_engine import PARAMS, IndexEngine, TableReward, prompts
from trueline.config.algorithm import DynamicSamplingConfig
from trueline.config.reward import RewardPartConfig
from trueline.config.rl import EvaluationConfig
from trueline.data.loader import Order
from trueline.environments.single_turn import SingleTurn
from trueline.monitoring.ledger import Ledger
from trueline.rewards.combined import CombinedReward
from trueline.rollout.episode import Episodes
from trueline.rollout.evaluation import Evaluator
from trueline.rollout.failures import FailureBudget
from trueline.rollout.groups import GroupSampler, SamplerSpec, sample_each
from trueline.rollout.rollouts import RolloutPlan, Rollouts
from trueline.runtime.actors import ActorFailure
from trueline.runtime.event_loop import EventLoop


def sampler(episodes: Episodes, seed: int | None = 0, greedy: bool = False) -> GroupSampler:
    """Of two completions each."""
    reward = CombinedReward({"reward": (TableReward(dict.fromkeys("abcdefgh", [0.0] * 9)), RewardPartConfig())}, 0.0)
    return GroupSampler(episodes, lambda: SingleTurn(reward), SamplerSpec(PARAMS, 2, seed, "test", greedy))


@pytest.mark.parametrize(("under_way", "most"), [(1, 2), (5, 4), (100, 16)])
def test_no_more_answers_are_under_way_than_allowed(
    episodes: Episodes, engine: IndexEngine, loop: EventLoop, under_way: int, most: int
) -> None:
    """Whole prompts of two answers, but at least one."""
    engine.delay = lambda prompt: 0.01
    groups = sample_each(sampler(episodes), enumerate(prompts(*"abcdefgh")), loop, in_flight=under_way)
    places = [place for place, _ in groups]
    assert sorted(places) == list(range(8))
    assert engine.most_running == most


def test_answers_come_as_they_are_done(episodes: Episodes, engine: IndexEngine, loop: EventLoop) -> None:
    engine.delay = lambda prompt: {"a": 0.2, "b": 0.1, "c": 0.0}[prompt]
    found = list(sample_each(sampler(episodes, seed=None), enumerate(prompts("a", "b", "c")), loop, in_flight=100))
    assert [place for place, _ in found] == [2, 1, 0]
    assert [group[0].prompt.label for _, group in found] == ["c", "b", "a"]
    assert {seed for _, seed in engine.requests.values()} == {None}


def test_the_wait_for_one_prompt_is_bounded_not_that_for_all(episodes: Episodes, engine: IndexEngine) -> None:
    engine.delay = lambda prompt: 0.1
    loop = EventLoop(timeout_seconds=0.5)
    assert len(list(sample_each(sampler(episodes), enumerate(prompts(*"abcdef")), loop, in_flight=1))) == 6
    engine.delay = lambda prompt: 5.0
    engine.requests.clear()
    with pytest.raises(ActorFailure, match=r"sampling 2 completions .*timeout_seconds"):
        list(sample_each(sampler(episodes), enumerate(prompts("a")), loop, in_flight=1))
    loop.stop()


def test_an_engine_that_fails_is_heard(episodes: Episodes, engine: IndexEngine, loop: EventLoop) -> None:
    def broken(prompt: str) -> float:
        raise ConnectionError("engine lost")

    engine.delay = broken
    with pytest.raises(ConnectionError, match="engine lost"):
        list(sample_each(sampler(episodes), enumerate(prompts("a")), loop, in_flight=1))


def test_rl_evaluation_and_jobs_seed_alike(episodes: Episodes, engine: IndexEngine, loop: EventLoop) -> None:
    """The seed of a completion is drawn from the run's seed, the prompt's number and the completion's, and halved."""
    expected = {
        (label, int(np.random.SeedSequence([7, number, index]).generate_state(1)[0]) // 2)
        for number, label in enumerate("ab")
        for index in range(2)
    }
    questions, groups = prompts("a", "b"), sampler(episodes, seed=7)
    list(sample_each(groups, enumerate(questions), loop, in_flight=100))
    assert set(engine.requests.values()) == expected
    engine.requests.clear()
    Evaluator(groups, {"": questions}, EvaluationConfig(samples=2, temperature=1.0), loop).run()
    assert set(engine.requests.values()) == expected
    engine.requests.clear()
    order, plan = Order(2, seed=0, shuffle=False, position=0), RolloutPlan(2, 0, DynamicSamplingConfig())
    rollouts = Rollouts(groups, questions, order, plan, FailureBudget(1.0, 4), loop, Ledger())
    rollouts.start(0)
    rollouts.take(2)
    assert set(engine.requests.values()) == expected


def test_a_number_seeds_and_a_place_names(episodes: Episodes, engine: IndexEngine, loop: EventLoop) -> None:
    """Prompt 5 comes first where the others are answered already; requests have their places' names."""
    (question,) = prompts("a")
    ((place, group),) = sample_each(sampler(episodes), [(5, question)], loop, in_flight=2)
    assert (place, {one.group for one in group}) == (0, {0})
    assert set(engine.requests) == {"test-0-0-0", "test-0-1-0"}
    seeds = {seed for _, seed in engine.requests.values()}
    engine.requests.clear()
    list(sample_each(sampler(episodes), [(0, question)], loop, in_flight=2))
    assert seeds.isdisjoint(seed for _, seed in engine.requests.values())
