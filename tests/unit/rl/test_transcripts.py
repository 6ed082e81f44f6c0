"""Which episodes of a step are written: whole groups, the same ones whenever it is asked, and no more than wanted."""

from typing import Any

import pytest

from trueline.config.rl import RLConfig
from trueline.data.types import Dialogue, Prompt, Trajectory
from trueline.rl.showcase import Showcase
from trueline.rl.transcripts import chosen_episodes, group_count, held_out_count
from trueline.rollout.summary import transcript

PROMPT = Prompt(0, [{"role": "user", "content": "?"}])


def step_of(*groups: list[float]) -> list[Trajectory]:
    return [Trajectory(PROMPT, number, reward=reward) for number, group in enumerate(groups) for reward in group]


def test_the_first_group_is_the_one_whose_rewards_differ_most() -> None:
    trajectories = step_of([0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.4, 0.5, 0.6])
    assert chosen_episodes(trajectories, 1, [0, 1]) == [3, 4, 5]


def test_the_other_groups_are_drawn_anew_in_each_step_and_alike_in_each_run() -> None:
    trajectories = step_of([0.0, 1.0], *[[0.5, 0.5]] * 6)
    drawn = [chosen_episodes(trajectories, 2, [0, step]) for step in range(20)]
    assert drawn == [chosen_episodes(trajectories, 2, [0, step]) for step in range(20)]
    assert all(places[:2] == [0, 1] and len(places) == 4 for places in drawn)
    assert len({places[2] for places in drawn}) > 3
    assert [chosen_episodes(trajectories, 2, [1, step]) for step in range(20)] != drawn


def test_more_groups_than_there_are_is_all_of_them() -> None:
    assert sorted(chosen_episodes(step_of([1.0], [0.0]), 9, [0, 0])) == [0, 1]


@pytest.mark.parametrize(("wanted", "size"), [(4, 8), (4, 4), (4, 1), (3, 5), (1, 64), (40, 8)])
def test_the_mean_number_of_transcripts_is_what_is_wanted(wanted: int, size: int) -> None:
    counts = [group_count(wanted, size, step, 100_000) for step in range(1, 6401)]
    assert counts[0] > 0
    assert sum(counts) * size / len(counts) == pytest.approx(wanted, rel=0.03)


def test_the_last_step_writes_and_none_does_where_none_is_wanted() -> None:
    assert [group_count(4, 8, step, 7) for step in range(1, 8)] == [2, 0, 0, 0, 2, 0, 2]
    assert not any(group_count(0, 8, step, 3) for step in range(1, 4))


def test_evaluations_write_whole_prompts() -> None:
    assert [held_out_count(samples) for samples in (1, 2, 3, 8)] == [3, 4, 3, 8]


def test_every_conversation_of_an_episode_is_written() -> None:
    trajectory = Trajectory(PROMPT, 3, reward=1.0, reply="b")
    asked = [[{"role": "user", "content": text}] for text in ("plan", "check")]
    answers = [[{"role": "assistant", "content": text}] for text in ("a", "b")]
    trajectory.dialogues = [Dialogue(*said) for said in zip(asked, answers, strict=True)]
    row = transcript(trajectory, "train")
    assert row["conversations"] == [
        {"number": 1, "prompt": asked[0], "turns": answers[0]},
        {"number": 2, "prompt": asked[1], "turns": answers[1]},
    ]
    trajectory.dialogues = trajectory.dialogues[:1]
    assert "conversations" not in transcript(trajectory, "train")


def test_a_step_without_transcripts_asks_no_worker_for_them() -> None:
    nobody: Any = None  # asking it would fail
    config = RLConfig.parse({"monitoring": {"transcripts_per_step": 0}})
    Showcase(config, nobody, nobody, nobody).show(1, [], nobody, None)
