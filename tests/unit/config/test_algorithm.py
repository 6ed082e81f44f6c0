import pytest

from trueline.config.algorithm import PRESETS, AlgorithmConfig
from trueline.config.base import ConfigError


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fills_what_is_not_set(preset: str) -> None:
    config = AlgorithmConfig.load([], [f"preset={preset}"])
    dumped = config.model_dump()
    for key, value in PRESETS[preset].items():
        if isinstance(value, dict):
            assert {inner: dumped[key][inner] for inner in value} == value
        else:
            assert dumped[key] == value


IN_REWARD = ("reward", 0.01)
PAPERS = {  # advantage, whitened, loss, weights, KL (place or estimator, coefficient), clip, answers per prompt
    "ppo": ("gae", True, "ppo_clip", "token_mean", IN_REWARD, (0.2, 0.2), 1),
    "reinforce++": ("reinforce", True, "ppo_clip", "token_mean", IN_REWARD, (0.2, 0.2), 1),
    "reinforce++_baseline": ("group_mean", True, "ppo_clip", "token_mean", ("k2", 1e-3), (0.2, 0.2), 8),
    "grpo": ("group_norm", False, "ppo_clip", "sequence_mean", ("k3", 1e-3), (0.2, 0.2), 8),
    "dr_grpo": ("group_mean", False, "ppo_clip", "constant", None, (0.2, 0.2), 8),
    "maxrl": ("maxrl", False, "ppo_clip", "constant", None, (0.2, 0.2), 16),
    "otb": ("otb", False, "ppo_clip", "constant", None, (0.2, 0.2), 8),
    "rloo": ("leave_one_out", False, "reinforce", "sequence_sum", IN_REWARD, None, 8),
    "remax": ("greedy_baseline", False, "reinforce", "sequence_sum", IN_REWARD, None, 1),
    "dapo": ("group_norm", False, "ppo_clip", "token_mean", None, (0.2, 0.28), 16),
    "gdpo": ("gdpo", True, "ppo_clip", "sequence_mean", None, (0.2, 0.2), 8),
    "gspo": ("group_norm", False, "gspo", "sequence_mean", None, (3e-4, 4e-4), 8),
    "cispo": ("group_norm", False, "cispo", "token_mean", None, None, 8),
    "dppo": ("group_norm", False, "dppo", "token_mean", None, (0.15, 0.15), 8),
    "vapo": ("gae", False, "ppo_clip", "token_mean", None, (0.2, 0.28), 16),
    "on_policy_distill": ("teacher", False, "ppo_clip", "token_mean", None, (0.2, 0.2), 1),
    "sdft": ("none", False, "reinforce", "token_mean", None, (0.2, 0.2), 1),
    "sdpo": ("none", False, "reinforce", "token_mean", None, (0.2, 0.2), 8),
    "opsd": ("none", False, "reinforce", "token_mean", None, (0.2, 0.2), 1),
}


def test_every_preset_has_its_row() -> None:
    assert set(PAPERS) == set(PRESETS)


@pytest.mark.parametrize("preset", PAPERS)
def test_the_presets_are_the_papers(preset: str) -> None:
    advantage, whiten, loss, weighting, kl, clip, group_size = PAPERS[preset]
    config = AlgorithmConfig(preset=preset)
    assert (config.advantage, config.whiten, config.loss) == (advantage, whiten, loss)
    assert (config.loss_aggregation, config.group_size) == (weighting, group_size)
    kind = "reward" if config.kl.place == "reward" else config.kl.estimator
    assert ((kind, config.kl.coefficient) if config.kl.coefficient else None) == kl
    assert config.needs_reference() == (kl is not None)
    if clip is not None:
        assert (config.clip_low, config.clip_high) == clip


def test_what_the_rows_add() -> None:
    ppo, dapo, vapo = (AlgorithmConfig(preset=preset) for preset in ("ppo", "dapo", "vapo"))
    assert (ppo.gamma, ppo.gae_lambda, ppo.length_adaptive, ppo.value_clip) == (1.0, 1.0, None, 0.5)
    assert dapo.dynamic_sampling.enabled
    assert (dapo.shaping.overlong_factor, dapo.shaping.overlong_share) == (1.0, 0.2)
    assert (vapo.length_adaptive, vapo.positive_nll) == (0.05, 0.1)
    assert vapo.critic_warmup_steps > 0
    assert (AlgorithmConfig(preset="cispo").ratio_cap, AlgorithmConfig(preset="rloo").ratio_cap) == (5.0, 5.0)
    dppo = AlgorithmConfig(preset="dppo")
    assert (dppo.divergence, dppo.ratio_cap, dppo.old_logprobs) == ("tv", 20.0, "rollout")
    assert dppo.importance_sampling.mode == "none"
    others = set(PRESETS) - {"dapo"}
    assert not any(AlgorithmConfig(preset=preset).dynamic_sampling.enabled for preset in others)
    assert not any(AlgorithmConfig(preset=preset).shaping.overlong_factor for preset in others)


def test_the_correction_is_truncation_unless_set() -> None:
    for preset in {*PRESETS} - {"dppo"}:
        chosen = AlgorithmConfig(preset=preset).importance_sampling
        assert (chosen.mode, chosen.cap, chosen.low, chosen.high) == ("token_truncate", 2.0, 0.5, 5.0)
        assert (chosen.sequence_low, chosen.sequence_high) == (0.99, 1.01)


def test_entropies_are_the_trainers() -> None:
    with pytest.raises(
        ConfigError, match=r"top_entropy_share=0\.2 needs entropies, .*: set algorithm\.old_logprobs=rec"
    ):
        AlgorithmConfig.load([], ["preset=dppo", "top_entropy_share=0.2"])


def test_what_is_set_wins_over_the_preset() -> None:
    config = AlgorithmConfig.load([], ["preset=grpo", "loss_aggregation=token_mean", "kl.coefficient=0.5"])
    assert (config.loss_aggregation, config.kl.coefficient) == ("token_mean", 0.5)
    assert config.kl.estimator == PRESETS["grpo"]["kl"]["estimator"]


def test_filling_a_preset_leaves_the_table_alone() -> None:
    AlgorithmConfig.load([], ["preset=grpo", "kl.coefficient=0.7"])
    assert PRESETS["grpo"]["kl"]["coefficient"] == 1e-3


@pytest.mark.parametrize("value", ["gpro", "[grpo]", "3"])
def test_an_unknown_preset_is_refused_with_the_known_ones(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig.load([], [f"preset={value}"])
    for name in PRESETS:
        assert name in str(caught.value)


def test_k1_is_no_loss_term() -> None:
    with pytest.raises(ConfigError, match=r"kl\.estimator"):
        AlgorithmConfig.load([], ["kl.estimator=k1"])


def test_dynamic_sampling_needs_groups() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.dynamic_sampling"):
        AlgorithmConfig.load([], ["preset=ppo", "dynamic_sampling.enabled=true"])


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_the_engines_log_probs_as_old_ones_leave_nothing_to_truncate(mode: str) -> None:
    with pytest.raises(ConfigError, match=rf"importance_sampling\.mode={mode}"):
        AlgorithmConfig.load([], ["preset=grpo", "old_logprobs=rollout", f"importance_sampling.mode={mode}"])


@pytest.mark.parametrize("mode", ["none", "token_mask", "sequence_mask"])
def test_the_engines_log_probs_as_old_ones_may_be_masked(mode: str) -> None:
    config = AlgorithmConfig.load([], ["preset=cispo", "old_logprobs=rollout", f"importance_sampling.mode={mode}"])
    assert config.old_logprobs == "rollout"
