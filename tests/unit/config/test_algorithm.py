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


def test_the_presets_are_the_papers() -> None:
    grpo, dr_grpo = AlgorithmConfig(preset="grpo"), AlgorithmConfig(preset="dr_grpo")
    assert (grpo.advantage, grpo.weighting, grpo.group_size) == ("group_norm", "sequence_mean", 8)
    assert (grpo.kl.estimator, grpo.kl.coefficient, grpo.clip_low, grpo.clip_high) == ("k3", 1e-3, 0.2, 0.2)
    assert (dr_grpo.advantage, dr_grpo.weighting, dr_grpo.kl.coefficient) == ("group_mean", "constant", 0.0)


def test_what_is_set_wins_over_the_preset() -> None:
    config = AlgorithmConfig.load([], ["preset=grpo", "weighting=token_mean", "kl.coefficient=0.5"])
    assert (config.weighting, config.kl.coefficient) == ("token_mean", 0.5)
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


@pytest.mark.parametrize("advantage", ["group_norm", "group_mean", "leave_one_out"])
def test_a_group_estimator_needs_two_answers(advantage: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig.load([], [f"advantage={advantage}", "group_size=1"])
    assert f"algorithm.advantage={advantage}" in str(caught.value)
    assert "algorithm.group_size" in str(caught.value)


def test_an_estimator_of_the_users_own_may_look_at_single_answers() -> None:
    assert AlgorithmConfig.load([], ["advantage=my.module:f", "group_size=1"]).group_size == 1


def test_k1_is_no_loss_term() -> None:
    with pytest.raises(ConfigError, match=r"kl\.estimator"):
        AlgorithmConfig.load([], ["kl.estimator=k1"])
