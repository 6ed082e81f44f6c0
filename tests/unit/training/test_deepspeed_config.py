import pytest

from trueline.config.model import RanksConfig, TrainingConfig
from trueline.training.deepspeed_config import effective_stage


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
