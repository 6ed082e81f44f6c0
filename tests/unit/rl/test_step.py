"""What a rollout worker computes over the samples of a step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.stored import store_samples
from tests.unit.rl.test_metrics import trajectory
from trueline.config.rl import RLConfig
from trueline.data.types import Sample
from trueline.rl.step import assess, stored_samples
from trueline.rollout.summary import Parcels, SampledGroup, summarise

NOWHERE: Any = None


def test_samples_know_each_reward_of_their_episode() -> None:
    """Not what else an episode reports; a reward that the completion made fail is missing."""
    first, second = trajectory(1.0, 0), trajectory(0.0, 0)
    first.metrics = {"reward/right": 1.0, "reward/brief": 0.25, "tools/calls": 3.0}
    second.metrics = {"reward/brief": 0.5}
    group = SampledGroup([summarise(first), summarise(second)], Parcels(*[NOWHERE] * 5))
    assert [row.parts for row in stored_samples([group]).rows] == [{"right": 1.0, "brief": 0.25}, {"brief": 0.5}]


def test_advantages_see_each_reward_with_its_weight() -> None:
    """Of `right`, 1 and 0: 1/sqrt(2) a side; of `brief`, 0.25 and 0.75 times -0.5; nothing is left of the rewards."""
    weights = {"right": 2.0, "brief": -0.5}
    values: list[dict[str, float]] = [{"right": 1.0, "brief": 0.25}, {"brief": 0.75}]
    samples = [Sample(torch.arange(3), torch.tensor([False, True, True])) for _ in values]
    for sample, found in zip(samples, values, strict=True):
        sample.task_reward = sum(weights[name] * value for name, value in found.items())
        sample.rollout_logprobs, sample.token_rewards = torch.zeros(3), torch.tensor([0.0, 0.0, sample.task_reward])
    stored = store_samples(samples)
    for row, found in zip(stored.rows, values, strict=True):
        row.parts = found
    parts = {name: {"function": "exact", "weight": weight} for name, weight in weights.items()}
    algorithm = {"preset": "gdpo", "whiten": False}
    config = RLConfig.model_validate({"algorithm": algorithm, "reward": {"parts": parts}})
    rollout: Any = SimpleNamespace(max_new_tokens=8, longest=lambda: 8)
    _, arrays = assess(NOWHERE, stored, config, rollout, 0.0)
    assert arrays["advantages"].tolist() == pytest.approx(
        [0.0, *[2.5 / 2**0.5] * 2, 0.0, *[-2.5 / 2**0.5] * 2], rel=1e-5
    )
