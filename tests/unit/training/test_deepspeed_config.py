import importlib
import sys
from pathlib import Path

import pytest

from trueline.config.model import RanksConfig, TrainingConfig
from trueline.training.engines.deepspeed_config import effective_stage, without_mlflow


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
    assert [effective_stage(ranks.parse({"deepspeed": {"zero_stage": stage}}), dtype) for stage in range(4)] == stages


def test_deepspeed_does_not_find_mlflow_and_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with without_mlflow(), pytest.raises(ModuleNotFoundError):
        importlib.import_module("mlflow")
    found = importlib.import_module("mlflow")
    with without_mlflow():  # where it is in use already
        assert importlib.import_module("mlflow") is found
    assert sys.modules.pop("mlflow") is found
