"""Which gradient estimates are right on average, on policies small enough to know the answer.

Shaping, advantages, weights and losses are the real ones; only the policy is a table of logits. `bandit` has one turn
of four answers, `tree` two turns with the environment's token between them and a reward after each. All groups of three
answers are enumerated, so that the expectation is exact; 100,000 of them are drawn as well, for the standard error.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from trueline.algorithms.advantages import assign_advantages
from trueline.algorithms.loss_aggregation import set_weights
from trueline.algorithms.policy_losses import policy_loss
from trueline.algorithms.reward_shaping import shape_rewards
from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Batch, ModelOutput, Sample

DRAWS, GROUP = 100_000, 3


@dataclass(frozen=True, eq=False)
class World:
    """State 0 comes first; action a leads to state a + 1, if there is a second turn."""

    mask: Tensor  # [T] bool
    logits: Tensor  # [states, actions]
    rewards: Tensor  # [states, actions], of a turn
    critic: Tensor  # [states], as wrong as it likes

    def paths(self) -> Tensor:
        """[paths, turns] every sequence of actions."""
        return torch.tensor(list(product(range(self.logits.shape[1]), repeat=int(self.mask.sum()))))

    def states(self, paths: Tensor) -> Tensor:
        """[.., turns] in which each action is taken."""
        return torch.cat([torch.zeros_like(paths[:, :1]), paths[:, :-1] + 1], 1)


BANDIT = World(
    torch.tensor([False, True]),
    torch.tensor([[0.5, -0.4, 0.0, 1.0]]),
    torch.tensor([[1.0, 0.2, -0.5, 0.0]]),
    torch.tensor([-0.7]),
)
TREE = World(
    torch.tensor([False, True, False, True]),
    torch.tensor([[0.3, -0.5, 0.1], [0.0, 1.0, -1.0], [0.6, 0.2, 0.0], [-0.3, 0.0, 0.9]]),
    torch.tensor([[0.5, 0.0, -0.3], [1.0, 0.0, 0.2], [-1.0, 2.0, 0.5], [0.0, 0.3, 0.7]]),
    torch.tensor([0.4, -1.0, 2.0, 0.5]),
)
WORLDS = {"bandit": BANDIT, "tree": TREE}


def path_chances(world: World, logits: Tensor) -> Tensor:
    """[paths]"""
    paths = world.paths()
    return logits.log_softmax(-1)[world.states(paths), paths].sum(1).exp()


def path_rewards(world: World) -> Tensor:
    """[paths, turns]"""
    paths = world.paths()
    return world.rewards[world.states(paths), paths]


def exact_gradient(world: World) -> Tensor:
    """[parameters] of the expected reward by the logits."""
    logits = world.logits.double().requires_grad_()
    (path_chances(world, logits) * path_rewards(world).sum(1)).sum().backward()
    assert logits.grad is not None
    return logits.grad.flatten()


@cache
def all_groups(world: World) -> tuple[Tensor, Tensor]:
    """[groups, GROUP] paths of the members, and [groups] the group's probability."""
    groups = torch.tensor(list(product(range(len(world.paths())), repeat=GROUP)))
    return groups, path_chances(world, world.logits.double())[groups].prod(1)


def samples_of(world: World, paths: list[int]) -> list[Sample]:
    """One answer per entry, GROUP to each prompt."""
    rewards, critic = path_rewards(world), world.critic[world.states(world.paths())]
    greedy = greedy_reward(world)
    samples = []
    for number, path in enumerate(paths):
        sample = Sample(torch.zeros(len(world.mask)), world.mask, group=number // GROUP, baseline=greedy)
        sample.reward = rewards[path].sum().item()
        sample.token_rewards = torch.zeros(len(world.mask)).masked_scatter(world.mask, rewards[path])
        sample.values = torch.full((len(world.mask),), 50.0).masked_scatter(world.mask, critic[path])
        policy = world.logits.log_softmax(-1)[world.states(world.paths())[path]]  # [turns, actions]
        taken = policy.gather(-1, world.paths()[path][:, None])[:, 0]
        sample.old_logprobs = torch.zeros(len(world.mask)).masked_scatter(world.mask, taken)
        sample.squares = torch.zeros(len(world.mask)).masked_scatter(world.mask, (2 * policy).exp().sum(-1))
        samples.append(sample)
    return samples


def greedy_reward(world: World) -> float:
    state, total = 0, 0.0
    for _ in range(int(world.mask.sum())):
        action = int(world.logits[state].argmax())
        total, state = total + world.rewards[state, action].item(), action + 1
    return total


def estimates(world: World, settings: dict[str, object], together: int | None = None) -> Tensor:
    """[groups, parameters] the gradient of the reward as each group alone would estimate it.

    Advantages are taken over all answers at once, or over so many at a time.
    """
    config = AlgorithmConfig.parse(
        {"preset": "rloo", "importance_sampling": {"mode": "none"}, "kl": {"coefficient": 0.0}} | settings
    )
    groups, _ = all_groups(world)
    samples = samples_of(world, groups.flatten().tolist())
    step = together or len(samples)
    for start in range(0, len(samples), step):
        assign_advantages(samples[start : start + step], config)
    set_weights(samples, config.loss_aggregation, 1)
    actions = world.paths()[groups.flatten()]
    states = world.states(actions)
    policy = world.logits.log_softmax(-1)
    slopes = loss_slopes(world, samples, policy[states, actions], config)  # [answers, turns]
    scores = one_hot(actions, world.logits.shape[1]) - policy.exp()[states]  # d log-prob / d logits of its state
    places = one_hot(states, len(world.logits)).float()
    gradients = torch.einsum("nt,nts,nta->nsa", -slopes * len(samples), places, scores)
    return gradients.double().view(len(groups), GROUP, -1).mean(1)


def loss_slopes(world: World, samples: list[Sample], logprobs: Tensor, config: AlgorithmConfig) -> Tensor:
    """[answers, turns] d loss / d log-prob, through the real loss, at a ratio of one."""
    mask = world.mask.repeat(len(samples))
    shares = torch.tensor([sample.weight for sample in samples])
    batch = Batch(mask.long(), mask, [len(world.mask)] * len(samples), shares, torch.zeros(len(samples)))
    old = torch.zeros(len(mask)).masked_scatter(mask, logprobs)
    batch.old_logprobs = batch.rollout_logprobs = old
    batch.advantages = torch.cat([sample.advantages for sample in samples])
    output = ModelOutput()
    output.logprobs, output.entropy = old.clone().requires_grad_(), torch.zeros(len(mask))
    (batch.token_weights() * policy_loss(output, batch, config).values).sum().backward()
    assert output.logprobs.grad is not None
    return output.logprobs.grad[mask].view_as(logprobs)


def expectation(world: World, found: Tensor) -> Tensor:
    return all_groups(world)[1] @ found


def errors(world: World, found: Tensor, exact: Tensor) -> Tensor:
    """[parameters] how many standard errors the mean over random groups is off."""
    generator = torch.Generator().manual_seed(0)
    drawn = found[torch.multinomial(all_groups(world)[1], DRAWS, replacement=True, generator=generator)]
    return (drawn.mean(0) - exact).abs() / (drawn.std(0) / math.sqrt(DRAWS))


UNBIASED: dict[str, dict[str, object]] = {
    "leave_one_out": {"advantage": "leave_one_out"},
    "greedy_baseline": {"advantage": "greedy_baseline"},
    "moving_average": {"advantage": "moving_average"},  # of other steps, as any number that does not depend on this one
    "reinforce": {"advantage": "reinforce"},
    "gae": {"advantage": "gae", "gae_lambda": 1.0},
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("estimator", UNBIASED)
def test_unbiased(name: str, estimator: str) -> None:
    world = WORLDS[name]
    found, exact = estimates(world, UNBIASED[estimator]), exact_gradient(world)
    torch.testing.assert_close(expectation(world, found), exact, rtol=1e-4, atol=1e-6)
    assert errors(world, found, exact).max() < 3


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize(("estimator", "together"), [("group_mean", None), ("batch_mean", GROUP)])
def test_a_mean_that_holds_the_answer_itself_shrinks_the_gradient(
    name: str, estimator: str, together: int | None
) -> None:
    """By 1 - 1/n exactly, which the learning rate can make good."""
    world = WORLDS[name]
    found, shrunk = estimates(world, {"advantage": estimator}, together), (1 - 1 / GROUP) * exact_gradient(world)
    torch.testing.assert_close(expectation(world, found), shrunk, rtol=1e-4, atol=1e-6)
    assert errors(world, found, shrunk).max() < 3
    assert errors(world, found, exact_gradient(world)).max() > 3


def test_maxrl_climbs_the_series_of_the_log_success_rate() -> None:
    """On average, groups of n give the gradient of the sum of pass@k / k over k < n: of p it is 1 + (1 - p) + ..."""
    world = replace(BANDIT, rewards=torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
    rate = (path_chances(world, world.logits.double()) * path_rewards(world).sum(1)).sum()
    slope = sum((1 - rate) ** (k - 1) for k in range(1, GROUP))
    found = estimates(world, {"advantage": "maxrl"})
    torch.testing.assert_close(expectation(world, found), slope * exact_gradient(world), rtol=1e-4, atol=1e-6)


BIASED: dict[str, tuple[dict[str, object], int | None]] = {
    "group_norm": ({"advantage": "group_norm"}, None),
    "otb": ({"advantage": "otb"}, None),
    "whitening": ({"advantage": "reinforce", "whiten": True}, GROUP),
    "gae with lambda < 1 and a wrong critic": ({"advantage": "gae", "gae_lambda": 0.5}, None),
}


@pytest.mark.parametrize("estimator", BIASED)
def test_biased_not_only_in_size_but_in_direction(estimator: str) -> None:
    found, exact = estimates(TREE, *BIASED[estimator]), exact_gradient(TREE)
    assert errors(TREE, found, exact).max() > 3
    direction = exact / exact.norm()
    across = found - (found @ direction)[:, None] * direction  # without its part along the exact gradient
    assert errors(TREE, across, torch.zeros_like(exact)).max() > 3


def test_gae_with_lambda_below_one_is_right_if_the_critic_is() -> None:
    chances = TREE.logits.softmax(-1)
    second = (chances[1:] * TREE.rewards[1:]).sum(1)
    first = (chances[0] * (TREE.rewards[0] + second)).sum()
    world = World(TREE.mask, TREE.logits, TREE.rewards, torch.cat([first[None], second]))
    found = estimates(world, {"advantage": "gae", "gae_lambda": 0.5})
    torch.testing.assert_close(expectation(world, found), exact_gradient(TREE), rtol=1e-4, atol=1e-6)


# KL to a reference, on answers of two tokens out of two: all four are enumerated, weighted by their probability

PATHS = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
STATES = torch.stack([torch.zeros(4, dtype=torch.long), PATHS[:, 0] + 1], 1)
POLICY = torch.tensor([[0.3, -0.8], [1.0, 0.2], [-0.5, 0.4]], dtype=torch.float64)
OLD = torch.tensor([[0.9, -0.1], [0.1, 0.6], [-0.2, -0.4]], dtype=torch.float64)
REFERENCE = torch.tensor([[-0.2, 0.5], [0.3, 0.9], [0.8, -0.6]], dtype=torch.float64)


def path_logprobs(logits: Tensor) -> Tensor:
    """[4, 2]"""
    return logits.log_softmax(-1)[STATES, PATHS]


def expected_loss_gradient(config: AlgorithmConfig, sampled_by: Tensor, advantages: Tensor) -> Tensor:
    """Of the mean over answers by `sampled_by` of the sum over tokens; `advantages` are [4, 2]."""
    logits = POLICY.clone().requires_grad_()
    old = path_logprobs(sampled_by)
    batch = Batch(PATHS.flatten(), torch.ones(8, dtype=torch.bool), [2] * 4, old.sum(1).exp(), torch.zeros(4))
    batch.old_logprobs = batch.rollout_logprobs = old.flatten()
    batch.ref_logprobs, batch.advantages = path_logprobs(REFERENCE).flatten(), advantages.flatten()
    output = ModelOutput()
    output.logprobs, output.entropy = path_logprobs(logits).flatten(), torch.zeros(8)
    (batch.token_weights() * policy_loss(output, batch, config).values).sum().backward()
    assert logits.grad is not None
    return logits.grad


def per_prefix_gradient(sampled_by: Tensor, forward: bool = False) -> Tensor:
    """Of KL(policy || reference) at each prefix, or of KL(reference || policy), weighted by how often it is visited."""
    logits = POLICY.clone().requires_grad_()
    policy, reference = logits.log_softmax(-1), REFERENCE.log_softmax(-1)
    here, there = (reference, policy) if forward else (policy, reference)
    visits = torch.cat([torch.ones(1, dtype=torch.float64), sampled_by[0].softmax(-1)])
    (visits * (here.exp() * (here - there)).sum(1)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def sequence_gradient() -> Tensor:
    """Of KL(policy || reference) between whole answers."""
    logits = POLICY.clone().requires_grad_()
    policy = path_logprobs(logits).sum(1)
    (policy.exp() * (policy - path_logprobs(REFERENCE).sum(1))).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("advantage", ["reinforce", "greedy_baseline"])
def test_k1_in_the_reward_has_the_gradient_of_the_sequence_kl(advantage: str) -> None:
    config = AlgorithmConfig.parse(
        {"preset": "rloo", "advantage": advantage, "kl": {"place": "reward"}, "importance_sampling": {"mode": "none"}}
    )
    samples = []
    for row, reference in zip(path_logprobs(POLICY).float(), path_logprobs(REFERENCE).float(), strict=True):
        sample = Sample(torch.zeros(2), torch.ones(2, dtype=torch.bool))
        sample.token_rewards, sample.old_logprobs, sample.ref_logprobs = torch.zeros(2), row, reference
        samples.append(sample)
    shape_rewards(samples, config, 2, 1.0)
    assign_advantages(samples, config)
    advantages = torch.stack([sample.advantages for sample in samples])
    found = expected_loss_gradient(config, POLICY, advantages)
    torch.testing.assert_close(found, sequence_gradient(), rtol=1e-5, atol=1e-6)


def in_loss(estimator: str, unbiased: bool = False) -> AlgorithmConfig:
    kl = {"coefficient": 1.0, "estimator": estimator, "unbiased": unbiased}
    return AlgorithmConfig.parse({"preset": "dr_grpo", "kl": kl, "importance_sampling": {"mode": "none"}})


NOTHING = torch.zeros(4, 2)


@pytest.mark.parametrize(("estimator", "forward"), [("k2", False), ("k3+", False), ("k3", True)])
def test_kl_losses_have_the_gradient_of_a_kl_at_each_prefix(estimator: str, forward: bool) -> None:
    found = expected_loss_gradient(in_loss(estimator), POLICY, NOTHING)
    torch.testing.assert_close(found, per_prefix_gradient(POLICY, forward))
    assert (found - per_prefix_gradient(POLICY, not forward)).abs().max() > 0.01
    assert (found - sequence_gradient()).abs().max() > 0.01  # a part of it: visits are taken as given


@pytest.mark.parametrize(("estimator", "unbiased"), [("k2", False), ("k3+", False), ("k3", True)])
def test_off_policy_too(estimator: str, unbiased: bool) -> None:
    """The prefixes are those that the old policy visits."""
    found = expected_loss_gradient(in_loss(estimator, unbiased), OLD, NOTHING)
    torch.testing.assert_close(found, per_prefix_gradient(OLD))


def test_off_policy_plain_k3_has_neither_gradient() -> None:
    found = expected_loss_gradient(in_loss("k3"), OLD, NOTHING)
    for forward in (False, True):
        assert (found - per_prefix_gradient(OLD, forward)).abs().max() > 0.01
