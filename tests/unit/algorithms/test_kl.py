import math

import pytest
import torch
from torch import Tensor

from trueline.algorithms.kl import KL_ESTIMATORS, estimated_kl, k2, k3, k3_plus, unbiased
from trueline.config.algorithm import KLConfig
from trueline.config.base import ConfigError

POLICY_LOGITS = [0.3, -1.1]
REFERENCE_LOGITS = [-0.4, 0.9]
LOG_RATIOS = [-2.0, -0.1, 0.0, 0.2, 1.5]
ONE = torch.ones(())


def expected_gradient(name: str) -> Tensor:
    """Over a policy of two tokens: sum over a of p(a) times the gradient of the estimate at a."""
    logits = torch.tensor(POLICY_LOGITS, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(-1)
    reference = torch.tensor(REFERENCE_LOGITS, dtype=torch.float64).log_softmax(-1)
    estimates = KL_ESTIMATORS[name](policy - reference, torch.ones_like(policy))
    (policy.detach().exp() * estimates).sum().backward()
    assert logits.grad is not None
    return logits.grad


def divergence_gradient(forward: bool) -> Tensor:
    logits = torch.tensor(POLICY_LOGITS, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(-1)
    reference = torch.tensor(REFERENCE_LOGITS, dtype=torch.float64).log_softmax(-1)
    reverse_kl = (policy.exp() * (policy - reference)).sum()
    forward_kl = (reference.exp() * (reference - policy)).sum()
    (forward_kl if forward else reverse_kl).backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize(("name", "forward"), [("k2", False), ("k3+", False), ("k3", True)])
def test_expected_gradient(name: str, forward: bool) -> None:
    torch.testing.assert_close(expected_gradient(name), divergence_gradient(forward))


def test_the_two_divergences_have_different_gradients_here() -> None:
    assert not torch.allclose(divergence_gradient(True), divergence_gradient(False), atol=1e-2)


@pytest.mark.parametrize("ratio", LOG_RATIOS)
def test_values(ratio: float) -> None:
    of = torch.tensor(ratio, dtype=torch.float64)
    assert k2(of, ONE).item() == pytest.approx(ratio**2 / 2)
    assert k3(of, ONE).item() == pytest.approx(math.exp(-ratio) - 1 + ratio)
    assert k3_plus(of, ONE).item() == pytest.approx(math.exp(-ratio) - 1 + ratio)


@pytest.mark.parametrize("ratio", LOG_RATIOS)
def test_gradients_by_the_log_ratio(ratio: float) -> None:
    closed = {"k2": ratio, "k3": 1 - math.exp(-ratio), "k3+": ratio}
    for name, slope in closed.items():
        of = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
        KL_ESTIMATORS[name](of, ONE).backward()
        assert of.grad is not None
        assert of.grad.item() == pytest.approx(slope), name


def test_k3_is_unbiased_for_the_reverse_divergence() -> None:
    policy = torch.tensor(POLICY_LOGITS, dtype=torch.float64).log_softmax(-1)
    reference = torch.tensor(REFERENCE_LOGITS, dtype=torch.float64).log_softmax(-1)
    mean = (policy.exp() * k3(policy - reference, ONE)).sum()
    torch.testing.assert_close(mean, (policy.exp() * (policy - reference)).sum())


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.5), (3.0, 3.0), (25.0, 10.0)])
def test_a_token_drawn_before_the_update_is_reweighted_up_to_ten(ratio: float, weight: float) -> None:
    of = torch.tensor(0.8, dtype=torch.float64)
    rho = torch.tensor(ratio, dtype=torch.float64)
    assert k2(of, rho).item() == pytest.approx(weight * 0.8**2 / 2)
    assert k3_plus(of, rho).item() == pytest.approx(weight * (math.exp(-0.8) - 1 + 0.8))
    assert k3(of, rho).item() == pytest.approx(math.exp(-0.8) - 1 + 0.8)


def test_the_weight_carries_no_gradient() -> None:
    rho = torch.tensor(2.0, requires_grad=True)
    of = torch.tensor(0.8, requires_grad=True)
    (k2(of, rho) + k3_plus(of, rho)).backward()
    assert rho.grad is None


def test_k3_is_bounded_where_the_policy_gave_a_token_up() -> None:
    for ratio in (-5.0, -50.0, -5000.0):
        assert k3(torch.tensor(ratio), ONE).item() == 10.0
    assert k3(torch.tensor(5000.0), ONE).item() == 10.0


def test_unbiased_is_k3_times_the_ratio_with_its_gradient() -> None:
    """d (rho k3) / d log p = rho (k3 + 1 - exp(-l)), as both l and log rho move with log p."""
    logprob = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    rho, of = 1.5 * torch.exp(logprob), 0.8 + logprob
    value = unbiased(of, rho)
    value.backward()
    at = math.exp(-0.8) - 1 + 0.8
    assert value.item() == pytest.approx(1.5 * at)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(1.5 * (at + 1 - math.exp(-0.8)))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_flag_is_for_k3_alone(estimator: str) -> None:
    of, rho = torch.tensor(0.8), torch.tensor(3.0)
    plain = KLConfig.parse({"estimator": estimator})
    assert estimated_kl(of, rho, plain) == KL_ESTIMATORS[estimator](of, rho)
    flagged = {"estimator": estimator, "unbiased": True}
    if estimator == "k3":
        assert estimated_kl(of, rho, KLConfig.parse(flagged)) == unbiased(of, rho)
    else:
        with pytest.raises(ConfigError, match="unbiased=true is for estimator=k3"):
            KLConfig.parse(flagged)
