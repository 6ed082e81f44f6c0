from typing import Any

import pytest
import torch

from trueline.data.types import Completion, Outcome, Prompt, Sample, Trajectory
from trueline.rl.metrics import describe_step, excerpt, over_updates, source_names
from trueline.rl.step import stored_samples
from trueline.rollout.rollouts import Dropped
from trueline.rollout.summary import REPEATED, Parcels, SampledGroup, repeated_share, summarise


def trajectory(reward: float, version: int, tokens: int = 2, *, group: int = 0, cut: bool = False) -> Trajectory:
    made = Trajectory(Prompt(0, [{"role": "user", "content": "?"}], source="a.jsonl"), group)
    made.add_observation([1, 2])
    made.add_action(Completion.of([5] * tokens, [-1.0] * tokens, version, "length" if cut else "stop"))
    made.add_reward(reward)
    made.truncated = cut
    made.metrics["reward/reward"] = reward
    return made


def described(groups: list[list[Trajectory]], dropped: Dropped | None = None, version: int = 7) -> dict[str, float]:
    known = [[summarise(one) for one in group] for group in groups]
    nowhere: Any = None
    rows = stored_samples([SampledGroup(group, Parcels(*[nowhere] * 5)) for group in known]).rows
    for row in rows:
        row.reward = row.task_reward - 0.5  # as shaping may do
    return describe_step(known, rows, dropped or Dropped(), version)


def test_staleness_is_the_largest_and_a_sample_is_as_old_as_its_oldest_token() -> None:
    older = trajectory(1.0, 6)
    older.add_action(Completion.of([5], [-1.0], 3, "stop"))
    found = described([[trajectory(1.0, 7), older], [trajectory(0.0, 5, group=1), trajectory(0.0, 6, group=1)]])
    assert found["rollout/staleness_max"] == 4
    assert found["rollout/staleness_mean"] == pytest.approx(7 - (2 * 7 + 2 * 6 + 3 + 2 * 5 + 2 * 6) / 9)
    assert found["rollout/several_versions_share"] == 0.25


def test_groups_of_one_have_no_spread_to_lack() -> None:
    ones = [[trajectory(1.0, 7)], [trajectory(0.0, 7, group=1)]]
    assert "reward/uniform_groups_share" not in described(ones)
    pair = [trajectory(1.0, 7, group=2), trajectory(0.0, 7, group=2)]
    assert described([*ones, pair])["reward/uniform_groups_share"] == 0


def test_rewards_lengths_and_outcomes_of_a_step() -> None:
    wrong = trajectory(0.0, 7, tokens=4)
    wrong.outcome = Outcome.POLICY_ERROR
    groups = [[trajectory(1.0, 7), wrong], [trajectory(2.0, 7, 6, group=1, cut=True), trajectory(2.0, 7, group=1)]]
    found = described(groups, Dropped(completions=3, left_out=4, groups=2, uniform=[0.0, 2.0, 2.0]))
    assert found["reward/mean"] == pytest.approx(1.25)
    assert found["reward/std"] == pytest.approx(torch.tensor([1.0, 0.0, 2.0, 2.0]).std(correction=0).item())
    assert found["reward/shaped_mean"] == pytest.approx(0.75)
    assert found["reward/uniform_groups_share"] == 0.5
    assert (found["reward/failed"], found["reward/left_out"]) == (3, 4)
    assert found["reward/policy_errors"] == 1
    assert found["response_length/mean"] == pytest.approx(3.5)
    assert found["response_length/max"] == 6
    assert found["response_length/truncated_share"] == 0.25
    assert found["rollout/groups"] == 2
    assert found["rollout/dropped_groups"] == 5
    assert found["speed/tokens"] == 4 * 2 + 14
    assert found["rollout/uniform_share"] == pytest.approx(3 / 7)
    assert found["rollout/uniform_highest_share"] == pytest.approx(2 / 7)
    assert found["rollout/uniform_lowest_share"] == pytest.approx(1 / 7)


def test_what_an_environment_reports_keeps_its_name_beside_the_parts_of_the_reward() -> None:
    first, second = trajectory(1.0, 7), trajectory(0.0, 7)
    first.metrics |= {"reward/style": 0.5, "environment/reward/mean": 4.0, "environment/step": 2.0}
    second.metrics |= {"environment/step": 4.0}
    found = described([[first, second]])
    assert (found["environment/reward/mean"], found["environment/step"]) == (4.0, 3.0)
    assert (found["reward/part/style"], found["reward/mean"]) == (0.5, 0.5) and "step" not in found


def test_reports_of_environments_count_every_episode_and_tell_of_those_without() -> None:
    """Left-out episodes too; a single report is the mean of its episode."""
    won, lost, silent = trajectory(1.0, 7), trajectory(0.0, 7), trajectory(0.0, 7)
    won.metrics |= {"environment/won": 1.0, "environment/hints": 2.0}
    lost.metrics |= {"environment/hints": 4.0, "environment/hints/mean": 3.0}
    found = described([[won, lost, silent]], Dropped(metrics=[{"environment/hints": 6.0}]))
    assert (found["environment/hints"], found["environment/hints/reported_share"]) == (4.0, 0.75)
    assert found["environment/hints/mean"] == pytest.approx((2 + 3 + 6) / 3)
    assert (found["environment/won"], found["environment/won/reported_share"]) == (1.0, 0.25)
    assert "environment/hints/mean/reported_share" not in found and "reward/reported_share" not in found


def test_a_step_tells_which_limits_cut_its_answers_off() -> None:
    turns, tokens, whole = trajectory(1.0, 7, cut=True), trajectory(0.0, 7, cut=True), trajectory(0.0, 7)
    turns.limit, tokens.limit = "environment.max_turns", "rollout.max_new_tokens"
    found = described([[turns, tokens, whole, whole]])
    by = {name.removeprefix("response_length/cut_by/"): share for name, share in found.items() if "cut_by" in name}
    assert by == {"environment.max_turns": 0.25, "rollout.max_new_tokens": 0.25}


@pytest.mark.parametrize("length", [3, REPEATED, REPEATED + 1, 400])
@pytest.mark.parametrize("words", [1, 2, 3, 50_000])
def test_runs_of_tokens_that_stood_before_are_counted(length: int, words: int) -> None:
    tokens = torch.randint(0, words, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    made = Trajectory(Prompt(0, [{"role": "user", "content": "?"}]), 0)
    made.add_observation([1] * 2 * REPEATED)
    made.add_action(Completion.of(tokens, [-1.0] * length, 0, "stop"))
    runs = [tuple(tokens[start : start + REPEATED]) for start in range(length - REPEATED + 1)]
    assert repeated_share([made]) == pytest.approx(1 - len(set(runs)) / len(runs) if runs else 0.0)


@pytest.mark.parametrize(
    ("prompt", "answer", "context", "start", "length"),
    [
        (12, 16, 128, 0, 28),  # all of it
        (12, 16, 28, 0, 27),  # an answer that fills the context: engines refuse a prompt without room for a token
        (600, 40, 700, 128, 512),  # behind a long prompt: all of the answer
        (600, 400, 1000, 344, 512),  # and of a long answer as much as of its prompt
        (256, 1, 257, 1, 256),
        (3, 2000, 2003, 0, 512),
    ],
)
def test_what_is_scored_again_are_sampled_tokens_within_the_context(
    prompt: int, answer: int, context: int, start: int, length: int
) -> None:
    tokens = torch.arange(prompt + answer)
    piece = excerpt(Sample(tokens, tokens >= prompt), context)
    assert piece.tokens.tolist() == list(range(start, start + min(length, prompt + answer - start)))
    assert piece.mask.tolist() == [token >= prompt for token in piece.tokens.tolist()]
    assert piece.mask.any() and piece.length() < context


def test_the_updates_of_a_step_are_reported_together() -> None:
    """Means, but for maxima and what says where the run stands; what only some updates have counts where it is."""
    updates = [
        {"loss": 1.0, "x_max": 5.0, "learning_rate": 0.3, "skipped_steps": 0.0, "memory/peak_gib": 2.0},
        {},
        {"loss": 2.0, "x_max": 4.0, "learning_rate": 0.2, "skipped_steps": 1.0, "memory/peak_gib": 3.0},
        {"loss": 6.0, "critic/skipped_steps": 2.0, "critic/learning_rate": 0.1, "critic/x_max": 1.0, "other": 8.0},
    ]
    assert over_updates(updates) == {
        "loss": 3.0,
        "x_max": 5.0,
        "learning_rate": 0.2,
        "skipped_steps": 1.0,
        "memory/peak_gib": 3.0,
        "critic/skipped_steps": 2.0,
        "critic/learning_rate": 0.1,
        "critic/x_max": 1.0,
        "other": 8.0,
    }


def test_datasets_are_named_alike_wherever_their_paths_begin() -> None:
    """A run that goes on knows them by absolute paths."""
    assert source_names(["a/one.jsonl", "b/two.jsonl"]) == {"a/one.jsonl": "one", "b/two.jsonl": "two"}
    for base in ("", "/data/"):
        paths = [f"{base}a/train.jsonl", f"{base}b/train.jsonl"]
        assert list(source_names(paths).values()) == ["a/train.jsonl", "b/train.jsonl"]
