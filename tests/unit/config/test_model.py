"""Combinations of model and training keys: each refusal names the keys and the remedy."""

import re

import pytest
from pydantic import ValidationError

from trueline.config.base import Config, ConfigError
from trueline.config.model import LoraConfig, ModelConfig, TrainingConfig, check_training
from trueline.config.rl import RLConfig
from trueline.config.supervised import SftConfig

SIX_RANKS = "training.ranks=6 model.tensor_parallel=2 model.context_parallel=2"
REFUSED = [  # overrides, and the parts of the message in their order
    (SIX_RANKS, [*SIX_RANKS.split(), "set it to 4 or a multiple"]),
    ("model.context_parallel=2 training.packing=false", ["model.context_parallel=2", "training.packing=true"]),
    ("model.lora.quantize=true", ["model.lora.quantize=true", "model.lora.rank to 1 or more (got 0)"]),
    (
        "training.share_prefixes=true training.packing=false",
        ["training.share_prefixes=true: training.packing=false pads sequences; set training.share_prefixes=auto"],
    ),
    (
        "training.share_prefixes=true model.context_parallel=2",
        ["training.share_prefixes=true: context_parallel=2 divides sequences"],
    ),
    ("model.lora.rank=4 model.tensor_parallel=2", ["model.lora.rank=4", "model.tensor_parallel=1 (got 2)"]),
]


@pytest.mark.parametrize("kind", [SftConfig, RLConfig])
@pytest.mark.parametrize(("overrides", "parts"), REFUSED)
def test_what_cannot_work_is_refused_by_key(kind: type[Config], overrides: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError, match=".*".join(map(re.escape, parts))):
        kind.load([], overrides.split())


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.ranks=8", "model.tensor_parallel=2", "model.context_parallel=2"],
        ["training.engine=torch", "training.ranks=1", "training.deepspeed.zero_stage=3"],
        ["training.offload=all", "training.deepspeed.zero_stage=3"],
        ["training.offload=optimizer", "training.deepspeed.zero_stage=1"],
        ["model.lora.rank=4", "model.lora.quantize=true"],
        ["model.lora.rank=4", "training.deepspeed.zero_stage=3", "model.context_parallel=2"],
        ["training.engine=torch", "model.lora.rank=4", "model.lora.quantize=true", "model.dtype=float32"],
        ["training.packing=false", "model.tensor_parallel=2"],
    ],
)
def test_what_can_work_is_accepted(overrides: list[str]) -> None:
    config = SftConfig.load([], overrides)
    check_training(config.training, config.model)


def test_the_defaults_fit_together() -> None:
    check_training(TrainingConfig(), ModelConfig())


@pytest.mark.parametrize(
    "override",
    [
        "model.lora.rank=-1",
        "model.lora.dropout=1",
        "model.lora.alpha=0",
        "model.context_parallel=0",
        "training.ema_decay=1",
        "training.decay_share=0",
        "training.max_bad_steps=-1",
        "training.schedule=exponential",
        "training.micro_batch_tokens=0",
        "checkpoint.keep=0",
        "checkpoint.keep_best=-1",
    ],
)
def test_values_out_of_range_are_refused_by_key(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SftConfig.load([], [override])
    assert str(caught.value).startswith(override.partition("=")[0])


def test_sections_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValidationError):
        LoraConfig.model_validate({"rnk": 3})
