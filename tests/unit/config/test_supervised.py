from pathlib import Path
from typing import get_args

import pytest

from trueline.config.base import Config, ConfigError
from trueline.config.supervised import (
    DistillConfig,
    KTOConfig,
    PreferenceConfig,
    PreferenceRunConfig,
    RewardModelConfig,
    SftConfig,
    SupervisedConfig,
)
from trueline.verbs import TASK_VERBS

LOSSES = get_args(PreferenceConfig.model_fields["loss"].annotation)


def test_the_dump_loads_back_equal(tmp_path: Path) -> None:
    config = SupervisedConfig.load([], ["steps=7", "training.learning_rate=2e-5", "runtime=local"])
    file = tmp_path / "config.yaml"
    file.write_text(config.dump())
    assert SupervisedConfig.load([file], []) == config


def test_runtime_local_fills_the_torch_engine() -> None:
    assert SupervisedConfig.load([], ["runtime=local"]).training.engine == "torch"
    assert SupervisedConfig().training.engine == "deepspeed"


@pytest.mark.parametrize("verb", sorted(TASK_VERBS))
def test_the_defaults_of_every_verb_can_be_read_and_written(verb: str, tmp_path: Path) -> None:
    chosen = TASK_VERBS[verb]
    config = chosen.kind.load([], [], chosen.defaults)
    assert config.task in {"sft", "distill", "preference", "kto", "rm", "prm"}
    assert chosen.meaning
    file = tmp_path / "config.yaml"
    file.write_text(config.dump())
    assert chosen.kind.load([file], [], chosen.defaults) == config


@pytest.mark.parametrize(
    ("verb", "loss"), [("dpo", "sigmoid"), ("cdpo", "sigmoid"), ("ipo", "ipo"), ("simpo", "simpo"), ("orpo", "orpo")]
)
def test_a_preference_verb_chooses_its_loss(verb: str, loss: str) -> None:
    chosen = TASK_VERBS[verb]
    config = chosen.kind.load([], [], chosen.defaults)
    assert isinstance(config, PreferenceRunConfig)
    assert config.preference.loss == loss
    assert (config.preference.label_smoothing > 0) == (verb == "cdpo")


def test_what_is_given_wins_over_a_verbs_defaults() -> None:
    chosen = TASK_VERBS["simpo"]
    config = chosen.kind.load([], ["preference.beta=5", "training.learning_rate=1e-3"], chosen.defaults)
    assert isinstance(config, PreferenceRunConfig)
    assert (config.preference.beta, config.preference.gamma, config.training.learning_rate) == (5.0, 1.0, 1e-3)


def test_held_out_rows_have_one_source() -> None:
    with pytest.raises(ConfigError) as caught:
        SftConfig.load([], ["evaluation.data=held.jsonl", "evaluation.share=0.1"])
    for part in ("evaluation.data=held.jsonl", "evaluation.share=0.1", "set one of them"):
        assert part in str(caught.value)


def test_without_a_word_nothing_is_held_out() -> None:
    evaluation = SftConfig().evaluation
    assert (evaluation.data, evaluation.share, evaluation.by, evaluation.limit) == ("", 0.0, None, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no held-out data"),
        (["evaluation.share=0.1", "evaluation.every=0"], "got 50 and 0"),
        (["checkpoint.save=false"], "writes no checkpoints"),
    ],
)
def test_the_best_is_not_looked_for_where_nothing_tells_it(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SftConfig.load([], ["checkpoint.keep_best=1", *words])


# Sections


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
        (SftConfig, "evaluation.share=1"),
        (SftConfig, "evaluation.share=-0.1"),
        (SftConfig, "evaluation.limit=0"),
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
def test_the_dump_of_a_section_loads_back_equal(kind: type[Config], overrides: list[str], tmp_path: Path) -> None:
    config = kind.load([], overrides)
    file = tmp_path / "config.yaml"
    file.write_text(config.dump())
    assert kind.load([file], []) == config
