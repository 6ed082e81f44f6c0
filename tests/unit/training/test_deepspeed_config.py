import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trueline.config.base import ConfigError, Tree
from trueline.config.model import FrozenConfig, ModelConfig, RanksConfig, TrainingConfig
from trueline.models.loading import ModelFacts
from trueline.plan.resolve import check_model_keys
from trueline.training.engines.deepspeed_config import effective_stage, without_mlflow, words

MIXTURE = ModelFacts(10**6, 64, 8, 4, 8, 10, 64, layers=1, intermediate_size=64, experts=6, kind="mixtral")
DIVIDED: Tree = {"ranks": 4, "deepspeed": {"expert_parallel": 2}}


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


@pytest.mark.parametrize(
    ("changed", "model", "facts", "said"),
    [
        ({}, {}, {"experts": 0}, "=2: models/x is a dense model: set it to 1"),
        (
            {},
            {},
            {"kind": "llama4_text"},
            "=2: llama4_text (models/x) is not supported: set it to 1, or use one of mixtral",
        ),
        ({"deepspeed": {"expert_parallel": 4}}, {}, {}, "=4: it does not divide the 6 experts of a layer"),
        ({"ranks": 3}, {}, {}, "=2: it does not divide training.ranks=3: set that to 2 or a multiple"),
        ({"ranks": None}, {}, {}, "=2: it does not divide training.ranks=1"),
        ({}, {"tensor_parallel": 2}, {}, "set model.tensor_parallel=1 (got 2)"),
        ({}, {"lora": {"rank": 8}}, {}, "set model.lora.rank=0 (got 8)"),
        ({"compile": True}, {}, {}, "set training.compile=false"),
        ({"engine": "fsdp2"}, {}, {}, "=2: training.engine=fsdp2 does not divide experts: set it to 1, or "),
        ({"engine": "torch"}, {}, {}, "=2: training.engine=torch does not divide experts: set it to 1, or "),
    ],
)
def test_divided_experts_are_refused_by_name_where_they_do_not_work(
    changed: Tree, model: Tree, facts: Tree, said: str
) -> None:
    shape, seen = ModelConfig.parse({"path": "models/x"} | model), replace(MIXTURE, **facts)
    with pytest.raises(ConfigError) as refusal:
        check_model_keys(TrainingConfig.parse(DIVIDED | changed), shape, seen)
    assert str(refusal.value).startswith("training.deepspeed.expert_parallel=") and said in str(refusal.value)
    check_model_keys(TrainingConfig.parse(DIVIDED | changed | {"deepspeed": {}}), shape, seen)


@pytest.mark.parametrize("kind", [TrainingConfig, FrozenConfig])
@pytest.mark.parametrize("stage", [0, 3])
def test_experts_are_divided_where_they_can_be(kind: type[RanksConfig], stage: int) -> None:
    ranks = kind.parse({"ranks": 4, "deepspeed": {"zero_stage": stage, "expert_parallel": 2}})
    check_model_keys(ranks, ModelConfig(), MIXTURE)
    assert words(ranks) == f"ZeRO {stage}, experts over 2 ranks"
