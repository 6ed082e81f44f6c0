"""Evaluation with an engine that says which completion it is, and a reward that looks it up."""

from typing import Any

import numpy as np
import pytest

from tests.support.index_engine import FAILS, PARAMS, IndexEngine, TableReward, prompts
from trueline.config.reward import RewardPartConfig
from trueline.config.rl import EvaluationConfig
from trueline.data.types import Completion, Outcome, Prompt, Trajectory
from trueline.environments.single_turn import SingleTurn
from trueline.rewards.combined import CombinedReward
from trueline.rollout.engine import derive_seed
from trueline.rollout.episode import Episodes
from trueline.rollout.evaluation import Evaluator, environment_names
from trueline.rollout.groups import GroupSampler, SamplerSpec
from trueline.runtime.event_loop import EventLoop

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
    sampler = GroupSampler(episodes, lambda: SingleTurn(reward), SamplerSpec(PARAMS, samples, 5, "evaluate"))
    return Evaluator(sampler, sets, config, loop).run()


def test_one_answer_to_each_prompt_of_one_set(episodes: Episodes, loop: EventLoop) -> None:
    """Of rewards 1 and 0: mean 0.5, half width 1.96 * sqrt(0.5) / sqrt(2) = 0.98; `0` and the end are two tokens."""
    table: Table = {"right": [1.0], "wrong": [0.0]}
    metrics, trajectories = evaluated(episodes, loop, {"": prompts("right", "wrong")}, table)
    assert metrics == pytest.approx(
        {
            "evaluation/reward": 0.5,
            "evaluation/reward_ci95": 0.98,
            "evaluation/response_length": 2.0,
            "evaluation/truncated_share": 0.0,
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


def test_replies_and_rewards_stay_together_where_some_failed(episodes: Episodes, loop: EventLoop) -> None:
    """Two votes of four are for `2`, and the reply that got its reward is the second."""
    (prompt,) = prompts("a")
    found = [("lost", FAILS), ("1", 0.1), ("lost too", FAILS), ("2", 0.2), ("2", 0.3)]
    group = [Trajectory(prompt, 0, reward=reward, reply=reply) for reply, reward in found]
    sampler = GroupSampler(episodes, lambda: SingleTurn(CombinedReward({}, 0.0)), SamplerSpec(PARAMS, 5, 5, "evaluate"))
    assert Evaluator(sampler, {}, EvaluationConfig(samples=5, temperature=1.0), loop).describe([group])["maj@5"] == 0.2


def test_where_everything_failed_there_is_no_reward(episodes: Episodes, loop: EventLoop) -> None:
    metrics, _ = evaluated(episodes, loop, {"": prompts("a")}, {"a": [FAILS]})
    shares = {"evaluation/failed_share": 1.0, "evaluation/truncated_share": 0.0}
    assert metrics == {"evaluation/response_length": 2.0, **shares}


def test_the_length_of_an_episode_is_that_of_all_its_sequences(episodes: Episodes, loop: EventLoop) -> None:
    (prompt,) = prompts("a")
    (first, second), sampled = (Trajectory(prompt, 0, reward=1.0) for _ in range(2)), (3, 5)
    for one, tokens in zip((first, second), sampled, strict=True):
        one.add_observation([7, 8])
        one.add_action(Completion.of([5] * tokens, [-1.0] * tokens, 0, "stop"))
    first.branches = [second]
    sampler = GroupSampler(episodes, lambda: SingleTurn(CombinedReward({}, 0.0)), SamplerSpec(PARAMS, 1, 5, "evaluate"))
    found = Evaluator(sampler, {}, EvaluationConfig(), loop).describe([[first]])
    assert found["response_length"] == sum(sampled)


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
    assert ("b", derive_seed(5, 0, 1)) in alone


def test_what_environments_report_is_a_mean_over_prompts(episodes: Episodes, loop: EventLoop) -> None:
    """Prompts weigh the same however many of their episodes report; a name of ours is never overwritten."""
    (first,), (second,) = prompts("a"), prompts("b")
    sampled = Trajectory(first, 0, mask=np.array([False, True]))

    def episode(prompt: Prompt, **metrics: float) -> Trajectory:
        branch = Trajectory(prompt, 0, mask=np.array([True, True]))
        found = Trajectory(prompt, 0, mask=sampled.mask, reward=1.0, branches=[branch])
        found.metrics = {name.replace("_", "/"): value for name, value in metrics.items()}
        return found

    groups = [
        [episode(first, game_won=1.0, failed=9.0), episode(first)],
        [episode(second, game_won=0.0, reward_x=1.0), episode(second, game_won=0.0)],
    ]
    sampler = GroupSampler(episodes, lambda: SingleTurn(CombinedReward({}, 0.0)), SamplerSpec(PARAMS, 2, 5, "evaluate"))
    found = Evaluator(sampler, {}, EvaluationConfig(samples=2, temperature=1.0), loop).describe(groups)
    assert (found["game/won"], found["failed"], found["failed_share"]) == (0.5, 9.0, 0.0)
    assert found["response_length"] == 3.0  # of all sequences of an episode
    assert "reward/x" not in found and environment_names(groups) == ["failed", "game/won"]
