import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trueline.algorithms.policy_losses import POLICY_LOSSES, policy_loss
from trueline.config.algorithm import AlgorithmConfig, CorrectionConfig, KLConfig
from trueline.config.base import ConfigError
from trueline.data.types import Batch, ModelOutput

LOW, HIGH = 0.2, 0.3
NO_CORRECTION = CorrectionConfig(kind="none")
# Ratios below, at, inside and above the clip, each with advantages of both signs and none.
RATIOS = [0.5, 0.8, 0.9, 1.0, 1.2, 1.3, 2.0]
ADVANTAGES = [1.5, -0.5, 0.0]
GRID = [(ratio, advantage) for ratio in RATIOS for advantage in ADVANTAGES]


def config(**settings: object) -> AlgorithmConfig:
    base = {"preset": "dr_grpo", "clip_low": LOW, "clip_high": HIGH, "correction": NO_CORRECTION}
    return AlgorithmConfig(**(base | settings))


def make(gap_to_rollout: float = 0.0, gap_to_reference: float = 0.0) -> tuple[ModelOutput, Batch]:
    """One sequence with every pair of GRID."""
    ratios = torch.tensor([ratio for ratio, _ in GRID])
    old = torch.linspace(-3, -1, len(GRID))
    logprobs = (old + ratios.log()).requires_grad_()
    tokens = torch.zeros(len(GRID), dtype=torch.long)
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), [len(GRID)], torch.ones(1), torch.zeros(1))
    batch.advantages = torch.tensor([advantage for _, advantage in GRID])
    batch.old_logprobs = old
    batch.rollout_logprobs = old - gap_to_rollout
    batch.ref_logprobs = logprobs.detach() - gap_to_reference
    output = ModelOutput()
    output.logprobs, output.entropy = logprobs, torch.full_like(old, 0.7)
    return output, batch


def naive_ppo(ratio: float, advantage: float) -> float:
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    return -min(ratio * advantage, clipped * advantage)


def naive_gradient(ratio: float, advantage: float) -> float:
    """d loss / d log-prob: nothing where the clip is in force, -ratio x advantage elsewhere."""
    above = advantage > 0 and ratio > 1 + HIGH
    below = advantage < 0 and ratio < 1 - LOW
    return 0.0 if above or below else -ratio * advantage


def close(found: Tensor, expected: list[float]) -> None:
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_ppo_clip_is_the_naive_loop() -> None:
    output, batch = make()
    close(policy_loss(output, batch, config()).values, [naive_ppo(*pair) for pair in GRID])


def test_ppo_clip_stops_the_gradient_on_both_sides() -> None:
    output, batch = make()
    policy_loss(output, batch, config()).values.sum().backward()
    inside = [at for at, (ratio, _) in enumerate(GRID) if ratio not in (1 - LOW, 1 + HIGH)]  # on the corner it is free
    assert output.logprobs.grad is not None
    close(output.logprobs.grad[inside], [naive_gradient(*GRID[at]) for at in inside])


def test_the_share_of_clipped_tokens_counts_those_whose_loss_the_clip_changed() -> None:
    output, batch = make()
    shares = policy_loss(output, batch, config()).means["policy/clipped_share"].tolist()
    for (ratio, advantage), share in zip(GRID, shares, strict=True):
        if ratio not in (1 - LOW, 1 + HIGH):
            assert share == float(naive_gradient(ratio, advantage) == 0 and advantage != 0)


def test_on_policy_the_loss_is_minus_the_advantage() -> None:
    output, batch = make()
    batch.old_logprobs = output.logprobs.detach()
    loss = policy_loss(output, batch, config())
    close(loss.values, [-advantage for _, advantage in GRID])
    assert (loss.means["policy/ratio"] == 1).all()
    assert (loss.maxima["policy/ratio_deviation_max"] == 0).all()


def test_a_ratio_that_would_overflow_is_bounded() -> None:
    output, batch = make()
    batch.old_logprobs = batch.old_logprobs - 1000
    assert policy_loss(output, batch, config()).values.isfinite().all()


def test_the_mismatch_weight_multiplies_the_policy_loss_but_not_the_kl_term() -> None:
    """Weight exp(0.5) = 1.65 under `truncate` with cap 2; KL k3 at l = 0.3."""
    output, batch = make(gap_to_rollout=0.5, gap_to_reference=0.3)
    kl = KLConfig(coefficient=0.4, estimator="k3")
    loss = policy_loss(output, batch, config(correction=CorrectionConfig(kind="truncate", cap=2.0), kl=kl))
    k3 = math.exp(-0.3) - 1 + 0.3
    close(loss.values, [math.exp(0.5) * naive_ppo(*pair) + 0.4 * k3 for pair in GRID])
    close(loss.means["policy/kl"], [k3] * len(GRID))


def test_the_entropy_bonus_is_subtracted() -> None:
    output, batch = make()
    loss = policy_loss(output, batch, config(entropy_coefficient=0.1))
    close(loss.values, [naive_ppo(*pair) - 0.1 * 0.7 for pair in GRID])


def test_without_a_kl_coefficient_no_reference_is_needed() -> None:
    output, batch = make()
    del batch.ref_logprobs
    assert "policy/kl" not in policy_loss(output, batch, config()).means


OWN_LOSS = """
from trueline.data.types import LossOutput

def twice(ratio, batch, config):
    return LossOutput(2 * ratio)
"""


def test_a_loss_of_the_users_own_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loss.py").write_text(OWN_LOSS)
    monkeypatch.syspath_prepend(str(tmp_path))
    output, batch = make()
    loss = policy_loss(output, batch, config(loss="own_loss:twice"))
    close(loss.values, [2 * ratio for ratio, _ in GRID])


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        policy_loss(*make(), config(loss="ppo_clap"))
    assert "algorithm.loss=ppo_clap" in str(caught.value)
    for name in POLICY_LOSSES:
        assert name in str(caught.value)
