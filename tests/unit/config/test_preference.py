from pathlib import Path
from typing import get_args

import pytest

from trueline.config.base import Config, ConfigError
from trueline.config.supervised import DistillConfig, KTOConfig, PreferenceConfig, RewardModelConfig

LOSSES = get_args(PreferenceConfig.model_fields["loss"].annotation)


def test_the_defaults_are_dpos() -> None:
    config = PreferenceConfig()
    assert (config.loss, config.beta, config.label_smoothing, config.nll_coefficient) == ("sigmoid", 0.1, 0.0, 0.0)


def test_the_defaults_of_the_others_are_their_papers() -> None:
    assert KTOConfig().model_dump() == {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    assert (RewardModelConfig().centering, RewardModelConfig().margin_column) == (0.0, None)
    assert (DistillConfig().divergence, DistillConfig().temperature, DistillConfig().top_k) == ("forward", 1.0, None)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_can_be_chosen(loss: str) -> None:
    assert PreferenceConfig.load([], [f"loss={loss}"]).loss == loss


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        PreferenceConfig.load([], ["loss=dop"])
    for loss in LOSSES:
        assert loss in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "override"),
    [
        (PreferenceConfig, "beta=0"),
        (PreferenceConfig, "label_smoothing=0.5"),
        (PreferenceConfig, "label_smoothing=-0.1"),
        (PreferenceConfig, "gamma=-1"),
        (PreferenceConfig, "odds_coefficient=0"),
        (PreferenceConfig, "nll_coefficient=-1"),
        (KTOConfig, "beta=0"),
        (KTOConfig, "desirable_weight=0"),
        (KTOConfig, "undesirable_weight=-1"),
        (RewardModelConfig, "centering=-0.01"),
        (DistillConfig, "temperature=0"),
        (DistillConfig, "top_k=0"),
        (DistillConfig, "divergence=kl"),
    ],
)
def test_values_out_of_range_are_refused_by_their_key(kind: type[Config], override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind.load([], [override])
    assert override.partition("=")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        (PreferenceConfig, ["loss=ipo", "length_normalized=false", "beta=0.5"]),
        (KTOConfig, ["undesirable_weight=1.33"]),
        (RewardModelConfig, ["centering=0.01", "margin_column=margin"]),
        (DistillConfig, ["teacher=big", "divergence=jsd", "top_k=64"]),
    ],
)
def test_the_dump_loads_back_equal(kind: type[Config], overrides: list[str], tmp_path: Path) -> None:
    config = kind.load([], overrides)
    file = tmp_path / "config.yaml"
    file.write_text(config.dump())
    assert kind.load([file], []) == config


@pytest.mark.parametrize("kind", [PreferenceConfig, KTOConfig, RewardModelConfig, DistillConfig])
def test_every_key_says_what_it_means(kind: type[Config]) -> None:
    assert all(key.meaning for key in kind().leaves())
