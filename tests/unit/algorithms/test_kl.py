import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trueline.algorithms.policy_losses import K3_LINEAR_BELOW, KL_ESTIMATORS, estimate_kl, k2, k3, k3_plus, unbiased_k3
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


def slope_of(estimate: Callable[[Tensor, Tensor], Tensor], log_ratio: float, rho: float = 1.0) -> float:
    """By autograd, of an estimate by the log-prob, with which l and log rho both move."""
    logprob = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    estimate(log_ratio + logprob, rho * torch.exp(logprob)).backward()
    assert logprob.grad is not None
    return logprob.grad.item()


FAR = [-5000.0, -50.0, -20.5, -5.0, -2.7, -2.62]  # k3 above 10: the policy gave the token up
NEAR = [-2.6, *LOG_RATIOS, 5.0, 11.5, 19.0, 21.0, 5000.0]


@pytest.mark.parametrize("ratio", NEAR)
def test_k3_has_its_own_slope_up_to_ten_and_where_the_policy_likes_a_token_more(ratio: float) -> None:
    assert slope_of(k3, ratio) == pytest.approx(1 - math.exp(-ratio), abs=1e-12)
    assert k3(torch.tensor(ratio, dtype=torch.float64), ONE).item() == pytest.approx(math.exp(-ratio) - 1 + ratio)


@pytest.mark.parametrize("ratio", FAR)
def test_k3_goes_on_linearly_from_ten_on(ratio: float) -> None:
    """Along the tangent: at the point p where exp(-p) - 1 + p = 10, the slope is 1 - exp(-p) = p - 10."""
    point = K3_LINEAR_BELOW
    assert math.exp(-point) - 1 + point == pytest.approx(10, abs=1e-8)
    assert slope_of(k3, ratio) == pytest.approx(point - 10, abs=1e-8)
    found = k3(torch.tensor(ratio, dtype=torch.float64), ONE).item()
    assert found == pytest.approx(10 + (point - 10) * (ratio - point))


def test_k3_is_continuous_in_value_and_slope_where_it_turns_linear() -> None:
    step = 1e-7
    sides = [torch.tensor(K3_LINEAR_BELOW + side, dtype=torch.float64) for side in (-step, 0.0, step)]
    values = [k3(side, ONE).item() for side in sides]
    slopes = [slope_of(k3, side.item()) for side in sides]
    assert values == pytest.approx([values[1]] * 3, abs=20 * step)
    assert slopes == pytest.approx([slopes[1]] * 3, abs=20 * step)


def test_unbiased_has_the_slope_rho_l_everywhere() -> None:
    """d (rho k3) / d log p = rho (k3 + 1 - exp(-l)) = rho l, as both l and log rho move with log p."""
    for ratio, rho in itertools.product([*FAR, *NEAR], [1e-3, 0.5, 1.0, 25.0, math.exp(20)]):
        assert slope_of(unbiased_k3, ratio, rho) == pytest.approx(rho * ratio), (ratio, rho)


def test_unbiased_has_the_value_of_k3_times_the_ratio() -> None:
    for of in torch.tensor([*FAR, *NEAR], dtype=torch.float64):
        assert unbiased_k3(of, torch.tensor(1.5)).item() == pytest.approx(1.5 * k3(of, ONE).item()), of


def test_unbiased_pulls_a_policy_that_left_the_reference_back() -> None:
    """Reference (.5, .5), policy (.02, .98), sampled by another: the gradient of KL(policy || reference)."""
    old = torch.tensor([0.3, 0.7], dtype=torch.float64)
    gradients = []
    for exact in (True, False):
        logits = torch.tensor([0.02, 0.98], dtype=torch.float64).log().requires_grad_()
        policy = logits.log_softmax(-1)
        log_ratio = policy - math.log(0.5)
        each = policy.exp() * log_ratio if exact else old * unbiased_k3(log_ratio, policy.exp() / old)
        each.sum().backward()
        assert logits.grad is not None
        gradients.append(logits.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    assert gradients[0][0].item() == pytest.approx(-0.0763, abs=1e-4)  # .02 x .98 x log(.02 / .98)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_flag_is_for_k3_alone(estimator: str) -> None:
    of, rho = torch.tensor(0.8), torch.tensor(3.0)
    plain = KLConfig.parse({"estimator": estimator})
    assert estimate_kl(of, rho, plain) == KL_ESTIMATORS[estimator](of, rho)
    flagged = {"estimator": estimator, "unbiased": True}
    if estimator == "k3":
        assert estimate_kl(of, rho, KLConfig.parse(flagged)) == unbiased_k3(of, rho)
    else:
        with pytest.raises(ConfigError, match="unbiased=true needs estimator=k3"):
            KLConfig.parse(flagged)
