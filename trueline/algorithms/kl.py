"""Per-token KL estimators between policy and reference, as loss terms."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trueline.config.algorithm import KLConfig

LOG_RATIO_LIMIT = 20.0
K3_LINEAR_BELOW = -2.6108686381  # the log-ratio at which k3 is 10
OFF_POLICY_LIMIT = 10.0


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp log-ratios before they are exponentiated."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k2(log_ratio: Tensor, ratio: Tensor) -> Tensor:
    """Return l^2 / 2, whose gradient is that of KL(policy || reference) at the token (arXiv:2510.01555)."""
    return off_policy(ratio) * log_ratio.square() / 2


def k3(log_ratio: Tensor, ratio: Tensor) -> Tensor:
    """Return exp(-l) - 1 + l (GRPO, arXiv:2402.03300, eq. 4), with the gradient of the forward KL(reference || policy).

    Above 10, where the policy gave a token up, it continues linearly, so that its slope is bounded and never zero.
    """
    near = log_ratio.clamp(min=K3_LINEAR_BELOW)
    slope = 1 - math.exp(-K3_LINEAR_BELOW)
    return torch.exp(-near) - 1 + near + slope * (log_ratio - near)


def k3_plus(log_ratio: Tensor, ratio: Tensor) -> Tensor:
    """Return the value of k3 with the gradient of k2."""
    return with_gradient_of(off_policy(ratio) * k3(log_ratio, ratio), k2(log_ratio, ratio))


def unbiased_k3(log_ratio: Tensor, ratio: Tensor) -> Tensor:
    """Return k3 times the ratio with its gradient, rho l (DeepSeek-V3.2, arXiv:2512.02556, section 3.1): unbiased for
    KL(policy || reference) off-policy too. The gradient is written out, as k3 is partly linear and ratios are clamped.
    """
    return with_gradient_of(ratio * k3(log_ratio, ratio), ratio.detach() * log_ratio.square() / 2)


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    return value.detach() + (other - other.detach())


def off_policy(ratio: Tensor) -> Tensor:
    """Return the importance weight of a token sampled before the update."""
    return ratio.detach().clamp(max=OFF_POLICY_LIMIT)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k2": k2, "k3": k3, "k3+": k3_plus}


def estimate_kl(log_ratio: Tensor, ratio: Tensor, config: KLConfig) -> Tensor:
    """Return the configured estimate [N]; `log_ratio` is to the reference, `ratio` to the policy that sampled."""
    is_unbiased = config.unbiased and config.estimator == "k3"
    return (unbiased_k3 if is_unbiased else KL_ESTIMATORS[config.estimator])(log_ratio, ratio)
