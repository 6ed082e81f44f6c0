"""The divergence from a teacher as a term of the policy loss."""

import math

import pytest
import torch

from trueline.algorithms.advantages import ADVANTAGES, check_needs, has_teacher, reads_reward
from trueline.algorithms.policy_losses import policy_loss, to_teacher
from trueline.config.algorithm import PRESETS, AlgorithmConfig, DistillationConfig
from trueline.config.base import ConfigError
from trueline.data.types import NO_TARGET, Batch, ModelOutput, Sample

# A teacher with three tokens, of which two are compared, and a policy: probabilities of each, and of the rest.
TEACHER, POLICY = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
MIDDLE = [0.35, 0.25, 0.4]


def kl(one: list[float], other: list[float]) -> float:
    return sum(p * math.log(p / q) for p, q in zip(one, other, strict=True))


EXPECTED = {
    "forward": kl(TEACHER, POLICY),
    "reverse": kl(POLICY, TEACHER),
    "jsd": (kl(TEACHER, MIDDLE) + kl(POLICY, MIDDLE)) / 2,
}


def case() -> tuple[ModelOutput, Batch]:
    """Two sampled tokens, of which the second has no teacher."""
    none = torch.zeros(2)
    batch = Batch(torch.tensor([1, 2]), torch.tensor([True, True]), [2], torch.ones(1), torch.zeros(1))
    batch.old_logprobs = batch.rollout_logprobs = batch.advantages = none
    batch.target_ids = torch.tensor([[4, 7], [NO_TARGET, NO_TARGET]])
    batch.target_logprobs = torch.tensor([TEACHER, TEACHER]).log().requires_grad_()
    output = ModelOutput()
    output.logprobs, output.entropy = none.clone().requires_grad_(), none
    output.target_logprobs = torch.tensor([POLICY, POLICY]).log().requires_grad_()
    return output, batch


@pytest.mark.parametrize("kind", EXPECTED)
def test_values_are_those_of_the_formulas_and_none_without_a_teacher(kind: str) -> None:
    output, batch = case()
    found = to_teacher(output, batch, DistillationConfig.parse({"divergence": kind}))
    assert found.tolist() == pytest.approx([EXPECTED[kind], 0.0], rel=1e-5)
    found.sum().backward()
    assert batch.target_logprobs.grad is None
    gradient = output.target_logprobs.grad
    assert gradient is not None and gradient[0].abs().min() > 0 and not gradient[1].any()


@pytest.mark.parametrize("coefficient", [0.0, 1.0, 2.5])
def test_the_coefficient_weighs_the_term_beside_the_advantages_loss(coefficient: float) -> None:
    output, batch = case()
    batch.advantages = torch.tensor([1.0, -1.0])
    tree = {"preset": "dr_grpo", "distillation": {"coefficient": coefficient, "divergence": "reverse"}}
    loss = policy_loss(output, batch, AlgorithmConfig.parse(tree))
    assert loss.values.tolist() == pytest.approx([-1 + coefficient * EXPECTED["reverse"], 1.0], rel=1e-5)
    assert ("distill/divergence" in loss.means) == (coefficient > 0)
    if coefficient:
        assert loss.means["distill/divergence"].tolist() == pytest.approx([EXPECTED["reverse"], 0.0], rel=1e-5)


def test_without_a_reward_only_the_divergence_teaches() -> None:
    sample = Sample(torch.arange(3), torch.tensor([False, True, True]), task_reward=1.0)
    ADVANTAGES["none"]([sample], AlgorithmConfig.parse({"preset": "sdft"}))
    assert sample.advantages.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("preset", ["sdft", "sdpo", "opsd"])
def test_presets_differ_by_keys_alone(preset: str) -> None:
    config = AlgorithmConfig.parse({"preset": preset})
    assert has_teacher(config) and not reads_reward(config) and config.distillation.coefficient == 1.0
    rows = {name: {key: value for key, value in row.items() if key != "distillation"} for name, row in PRESETS.items()}
    assert rows[preset] | {"group_size": 1} == rows["sdft"]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"advantage": "none"}, "nothing would be learnt"),
        ({"distillation": {"context": "solution", "template": "{solution}"}}, r"lacks \{prompt\} and \{solution\}"),
        ({"distillation": {"context": "feedback", "template": "{prompt}"}}, r"lacks \{prompt\} and \{demonstration\}"),
    ],
)
def test_what_would_teach_nothing_is_refused(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_needs(AlgorithmConfig.parse(tree))


@pytest.mark.parametrize("field", ["demonstration", "feedback"])
def test_feedback_may_show_either_field(field: str) -> None:
    AlgorithmConfig.parse({"distillation": {"context": "feedback", "template": f"{{prompt}} {{{field}}}"}})
