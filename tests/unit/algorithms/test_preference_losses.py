import math
from statistics import fmean
from typing import get_args

import pytest
import torch
from torch import Tensor

from trueline.algorithms.losses import LOSSES, PAIR_LOSSES, kto, preference, reward_model
from trueline.config.supervised import WITHOUT_REFERENCE, KTOConfig, PreferenceConfig, RewardModelConfig
from trueline.data.types import Batch, LossOutput, ModelOutput, Sample

# Log-probs of the policy and of the reference, token by token; chosen and rejected of two pairs, of unlike lengths.
POLICY = [[-0.5, -1.0, -0.25], [-2.0, -0.5], [-1.5], [-0.25, -0.75, -0.5, -0.125]]
REFERENCE = [[-0.75, -1.5, -0.5], [-1.0, -1.0], [-1.0], [-0.5, -1.0, -0.75, -0.5]]
CHOSEN, REJECTED = (0, 2), (1, 3)
FILLER: list[list[float]] = [[], []]
LOG_RATIOS = [sum(policy) - sum(reference) for policy, reference in zip(POLICY, REFERENCE, strict=True)]
MEANS = [fmean(row) for row in POLICY]
SETTINGS = {
    "sigmoid": PreferenceConfig(loss="sigmoid", beta=0.3, label_smoothing=0.1, nll_coefficient=0.2),
    "hinge": PreferenceConfig(loss="hinge", beta=0.3),
    "ipo": PreferenceConfig(loss="ipo", beta=0.3),
    "simpo": PreferenceConfig(loss="simpo", beta=2.0, gamma=0.5),
    "orpo": PreferenceConfig(loss="orpo", odds_coefficient=0.4),
}
EVERY_LOSS = pytest.mark.parametrize("name", SETTINGS)


def make(
    policy: list[list[float]], reference: list[list[float]], pairs: int | None = None
) -> tuple[ModelOutput, Batch]:
    """Each answer after two prompt tokens, on which the reference is absurd; an empty row is a filler."""
    count = pairs or sum(map(bool, policy)) // 2
    batch = Batch(
        tokens=torch.zeros(sum(map(len, policy)) + 2 * len(policy), dtype=torch.long),
        mask=torch.tensor([sampled for row in policy for sampled in [False, False, *[True] * len(row)]]),
        lengths=[len(row) + 2 for row in policy],
        shares=torch.tensor([1 / (2 * count) if row else 0.0 for row in policy]),
        labels=torch.zeros(len(policy)),
    )
    batch.ref_logprobs = torch.tensor([value for row in reference for value in [-50.0, 70.0, *row]])
    output = ModelOutput()
    output.logprobs = torch.tensor([value for row in policy for value in [0.0, 0.0, *row]], requires_grad=True)
    return output, batch


def total(loss: LossOutput, batch: Batch) -> Tensor:
    assert loss.per_sequence
    return (batch.shares * loss.values).sum()


def gradients(output: ModelOutput, batch: Batch, loss: LossOutput) -> list[Tensor]:
    """Of the mean loss, row by row."""
    total(loss, batch).backward()
    assert output.logprobs.grad is not None
    return list(output.logprobs.grad.split(batch.lengths))


def run(config: PreferenceConfig, policy: list[list[float]] = POLICY) -> LossOutput:
    return preference(*make(policy, REFERENCE), config)


def close(found: Tensor, expected: list[float]) -> None:
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def twice(values: list[float]) -> list[float]:
    return [value for value in values for _ in range(2)]


def log_sigmoid(value: float) -> float:
    return -math.log(1 + math.exp(-value))


def margins(rewards: list[float]) -> list[float]:
    return [rewards[chosen] - rewards[rejected] for chosen, rejected in zip(CHOSEN, REJECTED, strict=True)]


def log_odds(mean: float) -> float:
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


# Closed forms


def test_the_numbers_that_the_closed_forms_start_from() -> None:
    assert LOG_RATIOS == [1.0, -0.5, -0.5, 1.125]
    assert pytest.approx([-1.75 / 3, -1.25, -1.5, -0.40625]) == MEANS


def test_sigmoid_is_dpo() -> None:
    """Margins 1.5 and -1.625 in log-ratios."""
    loss = run(PreferenceConfig(loss="sigmoid", beta=0.1))
    close(loss.values, twice([-log_sigmoid(0.15), -log_sigmoid(-0.1625)]))


def test_label_smoothing_mixes_in_the_swapped_pair() -> None:
    loss = run(PreferenceConfig(loss="sigmoid", beta=0.1, label_smoothing=0.2))
    expected = [-0.8 * log_sigmoid(margin) - 0.2 * log_sigmoid(-margin) for margin in (0.15, -0.1625)]
    close(loss.values, twice(expected))


def test_label_smoothing_has_its_least_where_sigmoid_is_one_minus_the_share() -> None:
    """sigmoid(beta x) = 1 - e, so beta x = log((1 - e) / e): there the gradient is zero."""
    best = math.log(0.8 / 0.2)
    output, batch = make([[best], [0.0]], [[0.0], [0.0]])
    config = PreferenceConfig(beta=1.0, label_smoothing=0.2)
    for row in gradients(output, batch, preference(output, batch, config)):
        close(row, [0.0] * 3)


def test_hinge_is_zero_beyond_a_margin_of_one() -> None:
    close(run(PreferenceConfig(loss="hinge", beta=0.5)).values, twice([1 - 0.75, 1 + 0.8125]))
    close(run(PreferenceConfig(loss="hinge", beta=0.8)).values, twice([0.0, 1 + 1.3]))


def test_ipo_on_means_per_token() -> None:
    target = 1 / (2 * 0.25)
    first, second = 1.0 / 3 - -0.5 / 2, -0.5 / 1 - 1.125 / 4
    loss = run(PreferenceConfig(loss="ipo", beta=0.25))
    close(loss.values, twice([(first - target) ** 2, (second - target) ** 2]))
    close(loss.means["preference/margin"], twice([0.25 * first, 0.25 * second]))


def test_ipo_on_sums() -> None:
    target = 1 / (2 * 0.25)
    loss = run(PreferenceConfig(loss="ipo", beta=0.25, length_normalized=False))
    close(loss.values, twice([(1.5 - target) ** 2, (-1.625 - target) ** 2]))
    close(loss.means["preference/margin"], twice([0.25 * 1.5, 0.25 * -1.625]))


def test_simpo_compares_mean_logprobs_with_a_target_margin() -> None:
    expected = [-log_sigmoid(2 * margin - 1) for margin in margins(MEANS)]
    close(run(PreferenceConfig(loss="simpo", beta=2.0, gamma=1.0)).values, twice(expected))


def test_orpo_is_the_nll_plus_the_odds_ratio_term() -> None:
    odds = margins([log_odds(mean) for mean in MEANS])
    expected = [-MEANS[row] - 0.1 * log_sigmoid(margin) for row, margin in zip(CHOSEN, odds, strict=True)]
    loss = run(PreferenceConfig(loss="orpo", odds_coefficient=0.1))
    close(loss.values, twice(expected))
    close(loss.means["preference/margin"], twice(odds))


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "orpo"])
def test_the_nll_term_is_the_chosen_answers_mean(name: str) -> None:
    plain = run(SETTINGS[name].model_copy(update={"nll_coefficient": 0.0}))
    with_nll = run(SETTINGS[name].model_copy(update={"nll_coefficient": 0.5}))
    nll = twice([-MEANS[row] for row in CHOSEN])
    close(with_nll.values - plain.values, [0.5 * value for value in nll])
    close(with_nll.means["preference/nll"], nll)
    assert "preference/nll" not in plain.means


def test_the_nll_coefficient_does_not_touch_orpo() -> None:
    other = run(SETTINGS["orpo"].model_copy(update={"nll_coefficient": 3.0}))
    assert torch.equal(other.values, run(SETTINGS["orpo"]).values)


def test_the_mean_over_rows_is_the_mean_over_pairs() -> None:
    output, batch = make(POLICY, REFERENCE)
    loss = preference(output, batch, PreferenceConfig(beta=0.1))
    assert total(loss, batch).item() == pytest.approx(fmean([-log_sigmoid(0.15), -log_sigmoid(-0.1625)]))


# What is reported


def test_what_is_reported_of_dpo() -> None:
    means = run(PreferenceConfig(beta=0.1)).means
    expected = {
        "preference/accuracy": [1.0, 0.0],
        "preference/margin": [0.15, -0.1625],
        "preference/chosen_reward": [0.1, -0.05],
        "preference/rejected_reward": [-0.05, 0.1125],
        "preference/chosen_logprob": [-1.75, -1.5],
        "preference/rejected_logprob": [-2.5, -1.625],
    }
    assert set(means) == set(expected)
    for key, values in expected.items():
        close(means[key], twice(values))


@EVERY_LOSS
def test_margin_and_accuracy_follow_from_the_rewards(name: str) -> None:
    means = run(SETTINGS[name]).means
    margin = means["preference/chosen_reward"] - means["preference/rejected_reward"]
    assert torch.equal(means["preference/margin"], margin)
    assert torch.equal(means["preference/accuracy"], (margin > 0).float())
    assert not any(mean.requires_grad for mean in means.values())


def test_the_rewards_of_simpo_and_orpo_are_their_own() -> None:
    close(run(SETTINGS["simpo"]).means["preference/chosen_reward"], twice([2 * MEANS[row] for row in CHOSEN]))
    close(run(SETTINGS["orpo"]).means["preference/rejected_reward"], twice([log_odds(MEANS[row]) for row in REJECTED]))


def test_at_the_reference_no_pair_is_won() -> None:
    loss = run(PreferenceConfig(), REFERENCE)
    close(loss.values, [math.log(2)] * 4)
    assert (loss.means["preference/accuracy"] == 0).all()


# Gradients


def test_the_gradient_of_dpo() -> None:
    """-beta sigmoid(-beta x) on every token of the chosen answer, its opposite on the rejected one."""
    output, batch = make(POLICY, REFERENCE)
    rows = gradients(output, batch, preference(output, batch, PreferenceConfig(beta=0.1)))
    for pair, margin in enumerate((0.15, -0.1625)):
        pull = 0.1 / (1 + math.exp(margin)) / 2  # over two pairs
        close(rows[2 * pair], [0.0, 0.0] + [-pull] * len(POLICY[2 * pair]))
        close(rows[2 * pair + 1], [0.0, 0.0] + [pull] * len(POLICY[2 * pair + 1]))


def test_the_gradient_of_the_odds_ratio() -> None:
    """d lo / d a = 1 / (1 - exp a)."""
    output, batch = make(POLICY, REFERENCE)
    rows = gradients(output, batch, preference(output, batch, SETTINGS["orpo"]))
    for pair, margin in enumerate(margins([log_odds(mean) for mean in MEANS])):
        pull = 0.4 / (1 + math.exp(margin)) / 2
        chosen, rejected = MEANS[2 * pair], MEANS[2 * pair + 1]
        to_chosen = -(0.5 + pull / (1 - math.exp(chosen))) / len(POLICY[2 * pair])
        to_rejected = pull / (1 - math.exp(rejected)) / len(POLICY[2 * pair + 1])
        close(rows[2 * pair], [0.0, 0.0] + [to_chosen] * len(POLICY[2 * pair]))
        close(rows[2 * pair + 1], [0.0, 0.0] + [to_rejected] * len(POLICY[2 * pair + 1]))


@EVERY_LOSS
def test_a_step_raises_the_chosen_answer_and_lowers_the_rejected_one(name: str) -> None:
    output, batch = make(POLICY, REFERENCE)
    rows = gradients(output, batch, preference(output, batch, SETTINGS[name]))
    for chosen, rejected in zip(CHOSEN, REJECTED, strict=True):
        assert (rows[chosen][2:] < 0).all()
        assert (rows[rejected][2:] > 0).all()
    assert all((row[:2] == 0).all() for row in rows)


def test_hinge_lets_go_beyond_its_margin_and_ipo_pulls_back() -> None:
    """One pair at a log-ratio margin of 20, past 1 / beta = 10 and 1 / (2 beta) = 5."""
    for name, sign in (("hinge", 0), ("ipo", 1)):
        output, batch = make([[20.0], [0.0]], [[0.0], [0.0]])
        rows = gradients(output, batch, preference(output, batch, PreferenceConfig(loss=name, beta=0.1)))
        assert torch.sign(rows[0][2:]).tolist() == [sign]


# What must not matter


@EVERY_LOSS
def test_the_order_of_the_pairs_does_not_matter(name: str) -> None:
    output, batch = make(POLICY, REFERENCE)
    swapped_output, swapped = make(POLICY[2:] + POLICY[:2], REFERENCE[2:] + REFERENCE[:2])
    loss = preference(output, batch, SETTINGS[name])
    other = preference(swapped_output, swapped, SETTINGS[name])
    close(other.values.roll(2), loss.values.tolist())
    rows, moved = gradients(output, batch, loss), gradients(swapped_output, swapped, other)
    for row, same in zip(rows, moved[2:] + moved[:2], strict=True):
        close(same, row.tolist())


@EVERY_LOSS
def test_fillers_change_nothing_and_are_finite(name: str) -> None:
    output, batch = make(POLICY, REFERENCE)
    filled_output, filled = make(POLICY + FILLER, REFERENCE + FILLER)
    loss, other = preference(output, batch, SETTINGS[name]), preference(filled_output, filled, SETTINGS[name])
    assert other.values.isfinite().all()
    assert all(mean.isfinite().all() for mean in other.means.values())
    assert torch.equal(total(other, filled), total(loss, batch))
    rows = gradients(filled_output, filled, other)
    for row, same in zip(gradients(output, batch, loss), rows, strict=False):
        assert torch.equal(row, same)
    assert all((row == 0).all() for row in rows[4:])


@EVERY_LOSS
def test_micro_batches_add_up_to_the_whole(name: str) -> None:
    output, batch = make(POLICY, REFERENCE)
    whole = preference(output, batch, SETTINGS[name])
    parts = [make(POLICY[at : at + 2], REFERENCE[at : at + 2], pairs=2) for at in (0, 2)]
    losses = [preference(*part, SETTINGS[name]) for part in parts]
    sums = [total(loss, part_batch).item() for loss, (_, part_batch) in zip(losses, parts, strict=True)]
    assert sum(sums) == pytest.approx(total(whole, batch).item(), rel=1e-6)
    rows = [row for loss, part in zip(losses, parts, strict=True) for row in gradients(*part, loss)]
    for row, same in zip(gradients(output, batch, whole), rows, strict=True):
        close(same, row.tolist())


# Extremes


@EVERY_LOSS
@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
def test_far_from_the_reference_all_is_finite(name: str, gap: float) -> None:
    """For losses without a reference the log-probs themselves are far apart."""
    chosen, rejected = ([-1.0], [-1001.0]) if gap > 0 else ([-1001.0], [-1.0])
    output, batch = make([chosen, rejected], [[-1.0], [-1.0]])
    loss = preference(output, batch, SETTINGS[name])
    assert loss.values.isfinite().all()
    assert all(mean.isfinite().all() for mean in loss.means.values())
    assert all(row.isfinite().all() for row in gradients(output, batch, loss))


def test_a_lost_cause_keeps_its_gradient() -> None:
    """At a margin of -1000 the loss of DPO is 1000 beta, and its slope beta."""
    output, batch = make([[-1001.0], [-1.0]], [[-1.0], [-1.0]])
    loss = preference(output, batch, PreferenceConfig(beta=0.1))
    close(loss.values, [100.0, 100.0])
    close(gradients(output, batch, loss)[0], [0.0, 0.0, -0.1])


@pytest.mark.parametrize("certain", [0.0, 1e-7, -1e-12, -1e-7])
@pytest.mark.parametrize("row", [0, 1])
def test_orpo_is_finite_at_probability_one_and_still_pulls(certain: float, row: int) -> None:
    policy = [[-1.0], [-1.0]]
    policy[row] = [certain]
    output, batch = make(policy, [[0.0], [0.0]])
    loss = preference(output, batch, SETTINGS["orpo"])
    assert loss.values.isfinite().all()
    pulls = gradients(output, batch, loss)
    assert all(pull.isfinite().all() for pull in pulls)
    assert pulls[0][2] < 0 < pulls[1][2]


@pytest.mark.parametrize("mean", [-2e-6, -1e-3, -0.5, -20.0])
def test_the_limit_of_orpo_leaves_real_values_alone(mean: float) -> None:
    """log-odds = -log(exp(-a) - 1), in double precision."""
    output, batch = make([[mean], [-1.0]], [[0.0], [0.0]])
    means = preference(output, batch, SETTINGS["orpo"]).means
    close(means["preference/chosen_reward"], twice([-math.log(math.expm1(-mean))]))


def test_the_gradient_of_orpo_is_bounded_in_the_logit_up_to_probability_one() -> None:
    """1 / (1 - p) from the odds times 1 - p from the softmax: the log-odds of one token are its logit."""
    for logit in (1.0, 10.0, 14.0, 20.0, 60.0):
        score = torch.tensor(logit, requires_grad=True)
        _, batch = make([[0.0], [0.0]], [[0.0], [0.0]])
        output = ModelOutput()
        sure = torch.nn.functional.logsigmoid(score)
        output.logprobs = torch.zeros(6).index_put((torch.tensor([2, 5]),), torch.stack([sure.new_tensor(-1.0), sure]))
        config = PreferenceConfig(loss="orpo", odds_coefficient=1.0)
        total(preference(output, batch, config), batch).backward()
        assert score.grad is not None
        assert 0 <= score.grad.item() <= 1.01


# The table


def test_the_table_holds_every_loss_of_the_configuration() -> None:
    assert set(PAIR_LOSSES) == set(get_args(PreferenceConfig.model_fields["loss"].annotation)) == set(SETTINGS)


@EVERY_LOSS
def test_only_those_that_the_configuration_names_run_without_a_reference(name: str) -> None:
    output, batch = make(POLICY, REFERENCE)
    del batch.ref_logprobs
    if name in WITHOUT_REFERENCE:
        assert preference(output, batch, SETTINGS[name]).values.isfinite().all()
    else:
        with pytest.raises(AttributeError, match="ref_logprobs"):
            preference(output, batch, SETTINGS[name])


def test_an_odd_number_of_rows_is_refused() -> None:
    with pytest.raises(RuntimeError):
        preference(*make(POLICY[:3], REFERENCE[:3]), SETTINGS["sigmoid"])


def test_a_worker_finds_them_by_name() -> None:
    assert [LOSSES[name].compute for name in ("preference", "kto", "reward_model")] == [preference, kto, reward_model]


# KTO


def test_ktos_kl_is_the_mean_log_ratio_of_companions_and_never_below_zero() -> None:
    samples = [Sample(torch.arange(2), torch.ones(2, dtype=torch.bool)) for _ in range(2)]
    for sample, value in zip(samples, (1.0, 3.0), strict=True):
        sample.companion = Sample(torch.arange(3), torch.tensor([False, True, True]))
        sample.companion.ref_logprobs = torch.tensor([9.0, -value, -value])

    def found(logprob: float) -> dict[str, float]:
        def score(asked: list[Sample]) -> list[Tensor]:
            assert [id(one) for one in asked] == [id(sample.companion) for sample in samples]
            return [torch.full((3,), logprob) for _ in asked]

        return LOSSES["kto"].prepare(samples, KTOConfig(), score)

    assert found(0.0) == {"kto/kl": pytest.approx((2.0 + 6.0) / 2)}
    assert found(-10.0) == {"kto/kl": 0.0}


VERDICTS = [1.0, 0.0, 0.0, 1.0]
KL = 0.375


def judged(
    policy: list[list[float]] = POLICY, reference: list[list[float]] = REFERENCE, kl: float = KL
) -> tuple[ModelOutput, Batch]:
    output, batch = make(policy, reference)
    batch.labels = torch.tensor([*VERDICTS, 0.0, 0.0][: len(policy)])
    batch.statistics["kto/kl"] = kl
    return output, batch


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_kto_weighs_gains_and_losses_around_the_kl() -> None:
    """Log-ratios 1, -0.5, -0.5, 1.125 minus z = 0.375."""
    config = KTOConfig(beta=0.2, desirable_weight=1.5, undesirable_weight=0.5)
    loss = kto(*judged(), config)
    expected = [
        1.5 * (1 - logistic(0.2 * 0.625)),
        0.5 * (1 - logistic(0.2 * 0.875)),
        0.5 * (1 - logistic(0.2 * 0.875)),
        1.5 * (1 - logistic(0.2 * 0.75)),
    ]
    assert loss.per_sequence
    close(loss.values, expected)


def test_what_is_reported_of_kto() -> None:
    means = kto(*judged(kl=1.0625), KTOConfig(beta=0.2)).means
    assert set(means) == {"kto/accuracy", "kto/margin", "kto/log_ratio"}
    close(means["kto/log_ratio"], LOG_RATIOS)
    close(means["kto/margin"], [0.2 * -0.0625, 0.2 * 1.5625, 0.2 * 1.5625, 0.2 * 0.0625])
    close(means["kto/accuracy"], [0.0, 1.0, 1.0, 1.0])
    assert not any(mean.requires_grad for mean in means.values())


def test_the_gradient_of_kto() -> None:
    """-+ w beta s (1 - s), s = sigmoid(beta (x - z))."""
    output, batch = judged()
    rows = gradients(output, batch, kto(output, batch, KTOConfig(beta=0.2, undesirable_weight=0.5)))
    for row, ratio, verdict, tokens in zip(rows, LOG_RATIOS, VERDICTS, POLICY, strict=True):
        slope = 0.2 * logistic(0.2 * (ratio - KL)) * (1 - logistic(0.2 * (ratio - KL))) / 4
        close(row, [0.0, 0.0] + [-slope if verdict else 0.5 * slope] * len(tokens))


def test_kto_at_the_reference_is_half_the_weight_whatever_the_verdict() -> None:
    loss = kto(*judged(REFERENCE, REFERENCE, kl=0.0), KTOConfig(desirable_weight=2.0))
    close(loss.values, [1.0, 0.5, 0.5, 1.0])
    assert (loss.means["kto/accuracy"] == 0).all()


@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
def test_kto_far_from_the_reference_is_finite(gap: float) -> None:
    output, batch = judged([[gap], [gap], [gap], [gap]], [[0.0]] * 4)
    loss = kto(output, batch, KTOConfig())
    lost = 1.0 if gap < 0 else 0.0
    close(loss.values, [lost, 1 - lost, 1 - lost, lost])
    assert all(row.isfinite().all() for row in gradients(output, batch, loss))


def test_fillers_change_nothing_in_kto() -> None:
    output, batch = judged()
    filled_output, filled = judged(POLICY + FILLER, REFERENCE + FILLER)
    loss, other = kto(output, batch, KTOConfig()), kto(filled_output, filled, KTOConfig())
    assert torch.equal(total(other, filled), total(loss, batch))
    rows = gradients(filled_output, filled, other)
    for row, same in zip(gradients(output, batch, loss), rows, strict=False):
        assert torch.equal(row, same)
    assert all((row == 0).all() for row in rows[4:])


def test_answers_of_kto_do_not_see_each_other() -> None:
    alone = []
    for row, verdict in enumerate(VERDICTS):
        output, batch = make([POLICY[row]], [REFERENCE[row]], pairs=2)
        batch.labels, batch.statistics = torch.tensor([verdict]), {"kto/kl": KL}
        alone.append(kto(output, batch, KTOConfig()).values.item())
    close(kto(*judged(), KTOConfig()).values, alone)


# Reward model


REWARDS = [2.0, 0.5, -1.0, 0.25]


def scored(
    rewards: list[float] = REWARDS, margins_of_pairs: tuple[float, ...] = (0.0, 0.0)
) -> tuple[ModelOutput, Batch]:
    """The score counts at the last token of a sequence; at every other one it is absurd."""
    _, batch = make(POLICY, REFERENCE)
    batch.labels = torch.tensor(twice(list(margins_of_pairs)))
    ends = torch.tensor(batch.lengths).cumsum(0) - 1
    output = ModelOutput()
    output.scores = torch.full((len(batch.tokens), 1), 99.0).index_put((ends,), torch.tensor(rewards)[:, None])
    output.scores.requires_grad_()
    return output, batch


def test_the_reward_model_is_bradley_terry_on_the_last_tokens() -> None:
    close(reward_model(*scored(), RewardModelConfig()).values, twice([-log_sigmoid(1.5), -log_sigmoid(-1.25)]))


def test_a_margin_must_be_won_by() -> None:
    loss = reward_model(*scored(margins_of_pairs=(1.0, 0.25)), RewardModelConfig())
    close(loss.values, twice([-log_sigmoid(0.5), -log_sigmoid(-1.5)]))


def test_centring_adds_the_square_of_the_sum() -> None:
    loss = reward_model(*scored(), RewardModelConfig(centering=0.01))
    close(loss.values, twice([-log_sigmoid(1.5) + 0.01 * 2.5**2, -log_sigmoid(-1.25) + 0.01 * 0.75**2]))


def test_without_centring_a_shift_of_all_rewards_does_not_matter() -> None:
    shifted = reward_model(*scored([reward + 8 for reward in REWARDS]), RewardModelConfig())
    close(shifted.values, reward_model(*scored(), RewardModelConfig()).values.tolist())


def test_what_is_reported_of_a_reward_model() -> None:
    means = reward_model(*scored(margins_of_pairs=(4.0, 0.0)), RewardModelConfig()).means
    expected = {
        "reward_model/accuracy": [1.0, 0.0],
        "reward_model/margin": [1.5, -1.25],
        "reward_model/chosen": [2.0, -1.0],
        "reward_model/rejected": [0.5, 0.25],
    }
    assert set(means) == set(expected)
    for key, values in expected.items():
        close(means[key], twice(values))
        assert not means[key].requires_grad


def test_the_gradient_of_a_reward_model_reaches_last_tokens_only() -> None:
    output, batch = scored()
    total(reward_model(output, batch, RewardModelConfig()), batch).backward()
    assert output.scores.grad is not None
    pulls = [logistic(-1.5) / 2, logistic(1.25) / 2]
    rows = output.scores.grad[:, 0].split(batch.lengths)
    for row, last in zip(rows, [-pulls[0], pulls[0], -pulls[1], pulls[1]], strict=True):
        close(row, [0.0] * (len(row) - 1) + [last])


@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
def test_rewards_far_apart_are_finite(gap: float) -> None:
    output, batch = scored([gap, 0.0, gap, 0.0])
    loss = reward_model(output, batch, RewardModelConfig(centering=0.01))
    total(loss, batch).backward()
    assert loss.values.isfinite().all()
    assert output.scores.grad is not None
    assert output.scores.grad.isfinite().all()


def test_scores_in_half_precision_are_compared_in_float32() -> None:
    """bfloat16 holds 100 and 0.25, not their difference; so far out the loss is that difference."""
    output, batch = scored([0.25, 100.0, 0.25, 100.0])
    output.scores = output.scores.detach().bfloat16()
    assert reward_model(output, batch, RewardModelConfig()).values.tolist() == [99.75] * 4
