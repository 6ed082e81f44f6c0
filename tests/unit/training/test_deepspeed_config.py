import pytest

from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig
from trueline.models.loading import ModelFacts
from trueline.trainers.estimates import activation_bytes, model_bytes
from trueline.training.deepspeed_config import effective_stage

FACTS = ModelFacts(10**9, context=4096, heads=8, key_heads=4, head_size=64, vocabulary=1000, hidden_size=512, layers=4)


@pytest.mark.parametrize(
    ("ranks", "dtype", "stages"),
    [
        (TrainingConfig, "bfloat16", [2, 2, 2, 3]),
        (TrainingConfig, "float32", [0, 1, 2, 3]),
        (RanksConfig, "bfloat16", [0, 1, 2, 3]),
    ],
)
def test_a_model_trained_in_bfloat16_runs_at_stage_2_or_3(
    ranks: type[RanksConfig], dtype: str, stages: list[int]
) -> None:
    assert [effective_stage(ranks.parse({"zero_stage": stage}), dtype) for stage in range(4)] == stages


@pytest.mark.parametrize(
    ("dtype", "stage", "expected"),
    [
        # bytes per parameter on each of 4 ranks: weights, gradients, two moments, and in bfloat16 the master weights
        ("float32", 0, 4 + 4 + 8),
        ("float32", 1, 4 + 4 + 8 / 4),
        ("float32", 2, 4 + 4 / 4 + 8 / 4),
        ("float32", 3, 4 / 4 + 4 / 4 + 8 / 4),
        *(("bfloat16", stage, 2 + 4 / 4 + 12 / 4) for stage in (0, 1, 2)),
        ("bfloat16", 3, 2 / 4 + 4 / 4 + 12 / 4),
    ],
)
def test_memory_counts_gradients_in_float32(dtype: str, stage: int, expected: float) -> None:
    model, ranks = ModelConfig.parse({"dtype": dtype}), TrainingConfig.parse({"zero_stage": stage})
    found = model_bytes(FACTS, model, ranks, 4, tokens=0) - activation_bytes(FACTS, model, 0)
    assert found / FACTS.parameters == expected
