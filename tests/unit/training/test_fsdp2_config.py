"""What a plan knows of FSDP2: how it divides a model, what it holds besides, and what it refuses."""

import pytest

from trueline.config.base import ConfigError, Tree
from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig
from trueline.training.engines.division import Division, Sizes
from trueline.training.engines.fsdp2_config import check, division, words, working

FSDP2 = {"engine": "fsdp2"}
# 20 layers of 4 elements, and 20 elements of embeddings and head, on 4 ranks.
SIZES = Sizes(100, 20, 20, 4)


@pytest.mark.parametrize(("keys", "expected"), [({}, 4), ({"replicas": 2}, 2), ({"replicas": 4}, 1)])
def test_trained_models_are_divided_over_all_ranks_or_within_each_copy(keys: Tree, expected: int) -> None:
    ranks = TrainingConfig.parse(FSDP2 | keys)
    assert division(ranks, "float32", 4) == Division(expected, expected, expected)
    assert division(ranks, "bfloat16", 4) == Division(expected, expected, expected, casts=True)


def test_models_that_only_score_are_whole_unless_a_key_divides_them() -> None:
    assert division(RanksConfig.parse(FSDP2), "bfloat16", 4) == Division()
    assert division(RanksConfig.parse(FSDP2 | {"replicas": 2}), "bfloat16", 4) == Division(2, 2, 2)


@pytest.mark.parametrize(
    ("keys", "dtype", "expected"),
    [
        # Tables and two blocks that are gathered, and gradients of two blocks.
        ({}, "float32", 20 + 2 * 4 + 2 * 4),
        # These gradients in bfloat16 and, while they are reduced, in float32, which counts twice.
        ({}, "bfloat16", 20 + 2 * 4 + 2 * 3 * 4),
        ({"fsdp2": {"reshard": False}}, "float32", 100 + 2 * 4),
        # Whole gradients until the last pass.
        ({"fsdp2": {"reduce_each_pass": False}}, "float32", 20 + 2 * 4 + 2 * 4 + 100),
        ({"fsdp2": {"reduce_each_pass": False}}, "bfloat16", 20 + 2 * 4 + 2 * 3 * 4 + 2 * 100),
        # Four copies, each whole on its rank: it keeps what it computes with, and gradients once.
        ({"replicas": 4}, "float32", 100 + 2 * 4),
    ],
)
def test_what_is_gathered_counts_in_elements_of_the_compute_type(keys: Tree, dtype: str, expected: float) -> None:
    assert working(TrainingConfig.parse(FSDP2 | keys), dtype, SIZES) == expected


def test_one_rank_keeps_a_copy_of_its_weights_for_a_step_unless_a_key_frees_it() -> None:
    alone = Sizes(100, 20, 20, 1)
    freed = TrainingConfig.parse(FSDP2 | {"fsdp2": {"reshard": True}})
    for dtype, gradients in (("float32", 2 * 4), ("bfloat16", 2 * 3 * 4)):
        assert working(TrainingConfig.parse(FSDP2), dtype, alone) == 100 + gradients
        assert working(freed, dtype, alone) == 20 + 2 * 4 + gradients


def test_replicas_must_divide_the_ranks_that_share_a_model() -> None:
    check(TrainingConfig.parse(FSDP2 | {"ranks": 4, "replicas": 2}), ModelConfig(), "training")
    with pytest.raises(ConfigError, match=r"critic.replicas=4 does not divide the 3 ranks that share the model"):
        check(TrainingConfig.parse(FSDP2 | {"ranks": 6, "replicas": 4}), ModelConfig(tensor_parallel=2), "critic")


def test_split_layers_are_not_compiled() -> None:
    with pytest.raises(ConfigError, match=r"training.compile=true .*model.tensor_parallel=1 \(got 2\)"):
        check(TrainingConfig.parse(FSDP2 | {"compile": True}), ModelConfig(tensor_parallel=2), "training")


def test_the_plan_says_how_a_model_is_sharded() -> None:
    assert words(TrainingConfig.parse(FSDP2)) == "fully sharded"
    assert words(TrainingConfig.parse(FSDP2 | {"replicas": 2})) == "2 replicas"
