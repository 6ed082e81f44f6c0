import math
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import Tensor

from trueline.algorithms.loss_aggregation import set_weights
from trueline.algorithms.losses import LOSSES
from trueline.algorithms.policy_losses import POLICY_LOSSES, policy_loss
from trueline.config.algorithm import AlgorithmConfig, ImportanceSamplingConfig, KLConfig
from trueline.config.base import ConfigError
from trueline.data.types import Batch, ModelOutput, Sample

LOW, HIGH = 0.2, 0.3
NO_CORRECTION = ImportanceSamplingConfig(mode="none")
# Ratios below, at, inside and above the clip, each with advantages of both signs and none.
RATIOS = [0.5, 0.8, 0.9, 1.0, 1.2, 1.3, 2.0, 7.0]
ADVANTAGES = [1.5, -0.5, 0.0]
GRID = [(ratio, advantage) for ratio in RATIOS for advantage in ADVANTAGES]
CORNERS = (1 - LOW, 1 + HIGH)


def config(**settings: object) -> AlgorithmConfig:
    base = {"preset": "dr_grpo", "clip_low": LOW, "clip_high": HIGH, "importance_sampling": NO_CORRECTION}
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
    assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def gradient(output: ModelOutput) -> Tensor:
    assert output.logprobs.grad is not None
    return output.logprobs.grad


# Token by token


def test_ppo_clip_is_the_naive_loop() -> None:
    output, batch = make()
    close(policy_loss(output, batch, config()).values, [naive_ppo(*pair) for pair in GRID])


def test_ppo_clip_stops_the_gradient_on_both_sides() -> None:
    output, batch = make()
    policy_loss(output, batch, config()).values.sum().backward()
    inside = [at for at, (ratio, _) in enumerate(GRID) if ratio not in CORNERS]  # on the corner it is free
    close(gradient(output)[inside], [naive_gradient(*GRID[at]) for at in inside])


def test_the_share_of_clipped_tokens_counts_those_whose_loss_the_clip_changed() -> None:
    output, batch = make()
    shares = policy_loss(output, batch, config()).means["policy/clip_fraction"].tolist()
    for (ratio, advantage), share in zip(GRID, shares, strict=True):
        if ratio not in CORNERS:
            assert share == float(naive_gradient(ratio, advantage) == 0 and advantage != 0)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    """With c = 1.5, a token of ratio 2 or 7 and advantage -0.5 has loss 0.75 and no gradient; others are PPO's."""
    output, batch = make()
    loss = policy_loss(output, batch, config(dual_clip=1.5))
    beyond = [advantage < 0 and ratio > 1.5 for ratio, advantage in GRID]
    pairs = list(zip(GRID, beyond, strict=True))
    close(loss.values, [0.75 if bounded else naive_ppo(*pair) for pair, bounded in pairs])
    loss.values.sum().backward()
    inside = [at for at, (ratio, _) in enumerate(GRID) if ratio not in CORNERS]
    close(gradient(output)[inside], [0.0 if beyond[at] else naive_gradient(*GRID[at]) for at in inside])
    shares = loss.means["policy/clip_fraction"].tolist()
    assert all(shares[at] == 1 for at in range(len(GRID)) if beyond[at])
    assert set(shares) == {0.0, 1.0}


@pytest.mark.parametrize("name", ["cispo", "reinforce"])
def test_cispo_and_reinforce_weight_the_log_prob_by_the_capped_ratio(name: str) -> None:
    output, batch = make()
    loss = policy_loss(output, batch, config(loss=name, ratio_cap=5.0))
    weights = [-min(ratio, 5.0) * advantage for ratio, advantage in GRID]
    logprobs = output.logprobs.tolist()
    close(loss.values, [weight * logprob for weight, logprob in zip(weights, logprobs, strict=True)])
    loss.values.sum().backward()
    close(gradient(output), weights)  # every token keeps its gradient
    assert loss.means["policy/clip_fraction"].tolist() == [float(ratio > 5.0) for ratio, _ in GRID]


def test_sapo_is_a_sigmoid_of_the_ratio() -> None:
    """Its gradient by the log-prob is -4 s (1 - s) rho A, which is -A at rho = 1."""
    output, batch = make()
    loss = policy_loss(output, batch, config(loss="sapo"))
    temperatures = [1.0 if advantage > 0 else 1.05 for _, advantage in GRID]
    gates = [1 / (1 + math.exp(-tau * (pair[0] - 1))) for tau, pair in zip(temperatures, GRID, strict=True)]
    rows = list(zip(GRID, temperatures, gates, strict=True))
    close(loss.values, [-4 / tau * gate * advantage for (_, advantage), tau, gate in rows])
    loss.values.sum().backward()
    close(gradient(output), [-4 * gate * (1 - gate) * ratio * advantage for (ratio, advantage), _, gate in rows])


# Probabilities after and before an update, below, near and above bounds of 0.1 down and 0.2 up, both ways.
MOVES = [
    (0.5, 0.5),
    (0.35, 0.5),
    (0.45, 0.5),
    (0.65, 0.5),
    (0.75, 0.5),
    (0.2, 0.01),
    (0.3, 0.01),
    (0.8, 0.95),
    (0.99, 0.9),
]
SIGNED = [(after, before, advantage) for after, before in MOVES for advantage in (1.5, -0.5, 0.0)]


def moved() -> tuple[ModelOutput, Batch]:
    """One sequence with every row of SIGNED."""
    output, batch = make()
    after, before, advantages = (torch.tensor(column) for column in zip(*SIGNED, strict=True))
    batch.tokens, batch.lengths = torch.zeros(len(SIGNED), dtype=torch.long), [len(SIGNED)]
    batch.mask, batch.advantages = torch.ones_like(batch.tokens, dtype=torch.bool), advantages
    batch.old_logprobs = batch.rollout_logprobs = before.log()
    output.logprobs, output.entropy = after.log().requires_grad_(), torch.zeros(len(SIGNED))
    return output, batch


def divergence_of(kind: str, after: float, before: float) -> float:
    if kind == "tv":
        return abs(after - before)
    return before * math.log(before / after) + (1 - before) * math.log((1 - before) / (1 - after))


@pytest.mark.parametrize(("kind", "low", "high"), [("tv", 0.1, 0.2), ("kl", 0.01, 0.1)])
def test_dppo_drops_tokens_that_left_the_region_and_would_go_on(kind: str, low: float, high: float) -> None:
    """Where A > 0 the probability may not rise by more than `high`, where A < 0 not fall by more than `low`."""
    output, batch = moved()
    settings = config(loss="dppo", divergence=kind, clip_low=low, clip_high=high, ratio_cap=15.0)
    loss, weights, dropped = policy_loss(output, batch, settings), [], []
    for after, before, advantage in SIGNED:
        is_up, bound = advantage > 0, high if advantage > 0 else low
        outward = after > before if is_up else after < before
        dropped.append(outward and divergence_of(kind, after, before) > bound)
        weights.append(0.0 if dropped[-1] else -min(after / before, 15.0) * advantage)
    close(loss.values, [weight * logprob for weight, logprob in zip(weights, output.logprobs.tolist(), strict=True)])
    loss.values.sum().backward()
    close(gradient(output), weights)
    assert loss.means["policy/clip_fraction"].tolist() == [float(one) for one in dropped]
    signs = {
        (after > before, advantage > 0) for (after, before, advantage), out in zip(SIGNED, dropped, strict=True) if out
    }
    assert signs == {(True, True), (False, False)}  # a token that moves back is kept, however far it is


def test_dppos_two_bounds_are_their_own() -> None:
    """A token that rose from 0.5 to 0.65 by 0.15, and one that fell as far."""
    output, batch = moved()
    for low, high, kept in ((0.1, 0.2, (True, False)), (0.2, 0.1, (False, True))):
        values = policy_loss(output, batch, config(loss="dppo", clip_low=low, clip_high=high)).values
        rose, fell = SIGNED.index((0.65, 0.5, 1.5)), SIGNED.index((0.35, 0.5, -0.5))
        assert (bool(values[rose]), bool(values[fell])) == kept


def test_dppos_kl_is_finite_at_certainty() -> None:
    output, batch = moved()
    with torch.no_grad():
        output.logprobs[:2] = torch.tensor([0.0, -1e-9])
    batch.old_logprobs = batch.old_logprobs.clone()
    batch.old_logprobs[2] = 0.0
    loss = policy_loss(output, batch, config(loss="dppo", divergence="kl"))
    loss.values.sum().backward()
    assert loss.values.isfinite().all() and gradient(output).isfinite().all()
    assert loss.means["policy/clip_fraction"][0] == 1  # from 0.5 to 1, and on


# Answer by answer

ANSWERS = [  # ratios of the sampled tokens and the answer's advantage
    ([1.1, 0.9, 1.6], 2.0),
    ([0.5, 1.0], -1.0),
    ([3.0, 1.2, 0.9, 1.1], 0.5),
    ([1.0], -3.0),
]


def sample_of(ratios: list[float], advantage: float) -> tuple[Sample, Tensor]:
    """An answer, with an environment token inside it where it has several, and its log-probs under the policy."""
    flags = [False, True, False, *[True] * (len(ratios) - 1)]
    mask = torch.tensor(flags)
    sample = Sample(torch.zeros(len(mask), dtype=torch.long), mask)
    sample.old_logprobs = torch.linspace(-3, -1, len(mask)) * mask
    sample.rollout_logprobs = sample.old_logprobs - torch.linspace(-0.02, 0.05, len(mask)) * mask
    sample.ref_logprobs = sample.old_logprobs - 0.25 * mask
    sample.advantages = advantage * mask
    sample.label = float(advantage > 0)
    logprobs = sample.old_logprobs.clone()
    logprobs[mask] += torch.tensor(ratios).log()
    return sample, logprobs


def joined(rows: list[tuple[Sample, Tensor]]) -> tuple[ModelOutput, Batch]:
    samples = [sample for sample, _ in rows]
    batch = Batch(
        torch.cat([sample.tokens for sample in samples]),
        torch.cat([sample.mask for sample in samples]),
        [sample.length() for sample in samples],
        torch.tensor([sample.weight for sample in samples]),
        torch.tensor([sample.label for sample in samples]),
        {"positive_tokens": float(sum(len(ratios) for ratios, advantage in ANSWERS if advantage > 0))},
    )
    for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages"):
        setattr(batch, name, torch.cat([getattr(sample, name) for sample in samples]))
    output = ModelOutput()
    output.logprobs = torch.cat([logprobs for _, logprobs in rows]).requires_grad_()
    output.entropy = torch.linspace(0.1, 1.0, len(batch.tokens))
    return output, batch


def answers(loss_aggregation: str = "sequence_mean") -> list[tuple[Sample, Tensor]]:
    rows = [sample_of(*answer) for answer in ANSWERS]
    set_weights([sample for sample, _ in rows], loss_aggregation, 10)
    return rows


def total(output: ModelOutput, batch: Batch, settings: AlgorithmConfig) -> float:
    """As a worker sums it; the gradient goes to the log-probs."""
    value = (batch.token_weights() * policy_loss(output, batch, settings).values).sum()
    value.backward()
    return value.item()


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(fmean(map(math.log, ratios)))


def test_gspo_clips_the_answers_geometric_mean() -> None:
    """The whole loss is the mean over answers of -min(s A, clip(s) A)."""
    output, batch = joined(answers())
    found = total(output, batch, config(loss="gspo"))
    assert found == pytest.approx(fmean(naive_ppo(geometric_mean(ratios), advantage) for ratios, advantage in ANSWERS))


def test_the_gradient_of_gspo_is_that_of_the_answers_ratio() -> None:
    """d s / d log-prob of a token is s / length; nothing where the answer is clipped."""
    output, batch = joined(answers())
    total(output, batch, config(loss="gspo"))
    expected = [
        naive_gradient(geometric_mean(ratios), advantage) / len(ratios) / len(ANSWERS)
        for ratios, advantage in ANSWERS
        for _ in ratios
    ]
    close(gradient(output)[batch.mask], expected)
    assert 0.0 in expected  # the clip is in force somewhere


def test_gspo_has_no_dual_clip() -> None:
    output, batch = joined([sample_of([7.0, 7.0], -1.0)])
    close(policy_loss(output, batch, config(loss="gspo", dual_clip=3.0)).values[batch.mask], [7.0, 7.0])


def clipped_log(ratio: float, advantage: float) -> float:
    return min(math.log(ratio), 0.4) if advantage > 0 else max(math.log(ratio), -0.4)


def test_gmpo_is_the_geometric_mean_of_clipped_ratios() -> None:
    output, batch = joined(answers())
    found = total(output, batch, config(loss="gmpo"))
    values = [
        -math.exp(fmean(clipped_log(ratio, advantage) for ratio in ratios)) * advantage for ratios, advantage in ANSWERS
    ]
    assert found == pytest.approx(fmean(values))


def test_the_gradient_of_gmpo_skips_clipped_tokens() -> None:
    output, batch = joined(answers())
    total(output, batch, config(loss="gmpo"))
    expected = []
    for ratios, advantage in ANSWERS:
        logs = [clipped_log(ratio, advantage) for ratio in ratios]
        share = -math.exp(fmean(logs)) * advantage / len(ratios) / len(ANSWERS)
        free = [log == math.log(ratio) for log, ratio in zip(logs, ratios, strict=True)]
        expected += [share * is_free for is_free in free]
    close(gradient(output)[batch.mask], expected)
    assert expected.count(0.0) == 3  # the ratios 1.6, 0.5 and 3


def test_gmpo_counts_clipped_tokens() -> None:
    output, batch = joined(answers())
    shares = policy_loss(output, batch, config(loss="gmpo")).means["policy/clip_fraction"][batch.mask]
    assert shares.tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0, 0]


# Any loss


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    rows = answers()
    for sample, logprobs in rows:
        sample.old_logprobs = logprobs
    output, batch = joined(rows)
    total(output, batch, config(loss=name))
    torch.testing.assert_close(gradient(output), -batch.token_weights() * batch.advantages)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate", "sequence_mask"])
def test_micro_batches_and_order_change_nothing(name: str, mode: str) -> None:
    settings = config(
        loss=name,
        positive_nll=0.1,
        entropy_coefficient=0.1,
        kl=KLConfig(coefficient=0.1),
        importance_sampling=ImportanceSamplingConfig.parse({"mode": mode}),
    )
    rows = answers()
    whole, batch = joined(rows)
    at_once = total(whole, batch, settings)
    entropy = whole.entropy.split(batch.lengths)
    in_parts, gradients = 0.0, {}
    for part in ([3, 1], [0], [2]):
        output, micro_batch = joined([rows[at] for at in part])
        output.entropy = torch.cat([entropy[at] for at in part])
        in_parts += total(output, micro_batch, settings)
        gradients |= dict(zip(part, gradient(output).split(micro_batch.lengths), strict=True))
    assert in_parts == pytest.approx(at_once, rel=1e-5)
    torch.testing.assert_close(torch.cat([gradients[at] for at in range(len(rows))]), gradient(whole))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_filler_without_sampled_tokens_adds_nothing(name: str) -> None:
    filler, logprobs = sample_of([1.0], 0.0)
    filler.mask = torch.zeros_like(filler.mask)
    with_filler, batch = joined([*answers(), (filler, logprobs)])
    without, smaller = joined(answers())
    assert total(with_filler, batch, config(loss=name)) == pytest.approx(total(without, smaller, config(loss=name)))
    assert gradient(with_filler).isfinite().all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_ratio_that_would_overflow_is_bounded(name: str) -> None:
    output, batch = make()
    batch.old_logprobs = batch.old_logprobs - 1000
    policy_loss(output, batch, config(loss=name)).values.sum().backward()
    assert gradient(output).isfinite().all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_numbers_of_every_loss_have_a_value_per_token_and_no_gradient(name: str) -> None:
    output, batch = make()
    loss = policy_loss(output, batch, config(loss=name))
    names = {"policy/entropy", "policy/ratio", "policy/corrected_share"}
    assert loss.means.keys() - {"policy/clip_fraction"} == names
    for number in [*loss.means.values(), *loss.maxima.values()]:
        assert number.shape == batch.tokens.shape
        assert not number.requires_grad


def test_on_policy_the_loss_is_minus_the_advantage() -> None:
    output, batch = make()
    batch.old_logprobs = output.logprobs.detach()
    loss = policy_loss(output, batch, config())
    close(loss.values, [-advantage for _, advantage in GRID])
    assert (loss.means["policy/ratio"] == 1).all()
    assert (loss.maxima["policy/ratio_deviation_max"] == 0).all()


# Terms beside the loss


def test_the_mismatch_weight_multiplies_the_policy_loss_but_not_the_kl_term() -> None:
    """Weight exp(0.5) = 1.65 under `truncate` with cap 2; KL k3 at l = 0.3."""
    output, batch = make(gap_to_rollout=0.5, gap_to_reference=0.3)
    kl = KLConfig(coefficient=0.4, estimator="k3")
    loss = policy_loss(
        output, batch, config(importance_sampling=ImportanceSamplingConfig(mode="token_truncate", cap=2.0), kl=kl)
    )
    k3 = math.exp(-0.3) - 1 + 0.3
    close(loss.values, [math.exp(0.5) * naive_ppo(*pair) + 0.4 * k3 for pair in GRID])
    close(loss.means["policy/kl"], [k3] * len(GRID))
    assert not loss.means["policy/corrected_share"].any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_off_policy_mask_leaves_the_kl_term_of_the_tokens_it_masks(name: str) -> None:
    """The engine found every token e^0.6 times as likely as the policy does."""
    output, batch = make(gap_to_reference=0.3)
    batch.rollout_logprobs = output.logprobs.detach() + 0.6
    keys = ImportanceSamplingConfig(mode="none", off_policy_mask=0.5)
    loss = policy_loss(output, batch, config(loss=name, importance_sampling=keys, kl=KLConfig(coefficient=0.4)))
    term = 0.4 * (math.exp(-0.3) - 1 + 0.3)
    negative = batch.advantages < 0
    close(loss.values[negative], [term] * int(negative.sum()))
    assert (loss.values[batch.advantages > 0] != term).all()
    assert loss.means["policy/corrected_share"].equal(negative.float())


def test_truncated_and_masked_tokens_are_counted() -> None:
    output, batch = make(gap_to_rollout=2.0)
    for mode, factor in (("token_truncate", 2.0), ("token_mask", 0.0)):
        loss = policy_loss(output, batch, config(importance_sampling=ImportanceSamplingConfig.parse({"mode": mode})))
        close(loss.values, [factor * naive_ppo(*pair) for pair in GRID])
        assert loss.means["policy/corrected_share"].all()


def test_an_adapted_kl_coefficient_takes_the_place_of_the_configured_one() -> None:
    output, batch = make(gap_to_reference=0.3)
    batch.statistics = {"kl_coefficient": 0.9}
    loss = policy_loss(output, batch, config(kl=KLConfig(coefficient=0.4)))
    k3 = math.exp(-0.3) - 1 + 0.3
    close(loss.values, [naive_ppo(*pair) + 0.9 * k3 for pair in GRID])


def test_unbiased_multiplies_k3_by_the_ratio() -> None:
    output, batch = make(gap_to_reference=0.3)
    loss = policy_loss(output, batch, config(kl=KLConfig(coefficient=0.4, unbiased=True)))
    k3 = math.exp(-0.3) - 1 + 0.3
    close(loss.values, [naive_ppo(*pair) + 0.4 * pair[0] * k3 for pair in GRID])


@pytest.mark.parametrize("kl", [KLConfig(), KLConfig(coefficient=0.1, place="reward")])
def test_without_kl_in_the_loss_no_reference_is_needed(kl: KLConfig) -> None:
    output, batch = make()
    del batch.ref_logprobs
    assert "policy/kl" not in policy_loss(output, batch, config(kl=kl)).means


def test_the_entropy_bonus_is_subtracted() -> None:
    output, batch = make()
    loss = policy_loss(output, batch, config(entropy_coefficient=0.1))
    close(loss.values, [naive_ppo(*pair) - 0.1 * 0.7 for pair in GRID])


@pytest.mark.parametrize("loss_aggregation", ["token_mean", "sequence_mean", "constant", "sequence_sum"])
def test_positive_nll_is_a_mean_of_its_own_whatever_the_weights(loss_aggregation: str) -> None:
    """The tokens of answers 1 and 3, whose task reward is above 0, and nothing else."""
    rows = answers(loss_aggregation)
    plain, batch = joined(rows)
    extra, same = joined(rows)
    added = total(extra, same, config(positive_nll=0.1)) - total(plain, batch, config())
    tokens = torch.cat([rows[at][1][rows[at][0].mask] for at in (0, 2)])
    assert added == pytest.approx(0.1 * -tokens.mean().item(), rel=1e-4)
    difference = gradient(extra) - gradient(plain)
    expected = torch.where(batch.mask & (batch.spread(batch.labels) > 0), -0.1 / len(tokens), 0.0)
    torch.testing.assert_close(difference, expected, rtol=1e-4, atol=1e-6)


def test_answers_with_a_reward_above_zero_are_labelled_where_their_likelihood_counts() -> None:
    samples = [sample_of(ratios, 0.0)[0] for ratios in ([1.0], [1.0, 1.0], [1.0, 1.0, 1.0], [1.0])]
    for sample, reward, weight in zip(samples, (1.0, 0.5, -1.0, 2.0), (1.0, 1.0, 1.0, 0.0), strict=True):
        sample.task_reward, sample.weight = reward, weight
    prepare = LOSSES["policy"].prepare
    assert prepare(samples, config(), lambda asked: []) == {}
    assert [sample.label for sample in samples] == [0.0] * 4
    tokens = samples[0].sampled_tokens() + samples[1].sampled_tokens()  # the fourth is filtered
    assert prepare(samples, config(positive_nll=0.1), lambda asked: []) == {"positive_tokens": float(tokens)}
    assert [sample.label for sample in samples] == [1.0, 1.0, 0.0, 1.0]


def test_positive_nll_leaves_out_what_is_not_in_the_loss() -> None:
    rows = answers()
    rows[0][0].weight = 0.0  # filtered
    output, batch = joined(rows)
    with_nll, without = (policy_loss(output, batch, config(positive_nll=share)).values for share in (0.1, 0.0))
    first = slice(0, batch.lengths[0])
    assert with_nll[first].tolist() == without[first].tolist()
    assert with_nll.isfinite().all()


def test_positive_nll_is_nothing_where_no_answer_is_right() -> None:
    output, batch = joined(answers())
    batch.labels, batch.statistics = torch.zeros(len(ANSWERS)), {"positive_tokens": 0.0}
    with_nll, without = (policy_loss(output, batch, config(positive_nll=share)).values for share in (0.1, 0.0))
    assert with_nll.tolist() == without.tolist()


# Names

OWN_LOSS = """
from trueline.data.types import LossOutput

def twice(logprobs, batch, config):
    return LossOutput(2 * (logprobs - batch.old_logprobs).exp())
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
