from pathlib import Path

import pytest

from trueline.config.base import ConfigError
from trueline.config.supervised import SupervisedConfig


def test_the_dump_loads_back_equal(tmp_path: Path) -> None:
    config = SupervisedConfig.load([], ["steps=7", "training.learning_rate=2e-5", "runtime=local"])
    file = tmp_path / "config.yaml"
    file.write_text(config.dump())
    assert SupervisedConfig.load([file], []) == config


def test_runtime_local_fills_the_torch_engine() -> None:
    assert SupervisedConfig.load([], ["runtime=local"]).training.engine == "torch"
    assert SupervisedConfig().training.engine == "deepspeed"


def test_runtime_local_refuses_deepspeed() -> None:
    with pytest.raises(ConfigError) as caught:
        SupervisedConfig.load([], ["runtime=local", "training.engine=deepspeed"])
    assert "runtime=local" in str(caught.value)
    assert "training.engine=torch" in str(caught.value)


@pytest.mark.parametrize("runtime", ["ray", "local"])
def test_the_torch_engine_has_one_rank(runtime: str) -> None:
    """Its ranks would each train on a part of the data and never meet."""
    with pytest.raises(ConfigError) as caught:
        SupervisedConfig.load([], [f"runtime={runtime}", "training.engine=torch", "training.ranks=2"])
    assert "training.engine=torch" in str(caught.value)
    assert "training.ranks" in str(caught.value)


def test_the_torch_engine_has_no_master_weights_for_bfloat16() -> None:
    with pytest.raises(ConfigError) as caught:
        SupervisedConfig.load([], ["training.engine=torch", "model.dtype=bfloat16"])
    assert "training.engine=torch" in str(caught.value)
    assert "model.dtype=float32" in str(caught.value)


def test_the_longest_row_must_fit_into_a_pass() -> None:
    with pytest.raises(ConfigError) as caught:
        SupervisedConfig.load([], ["max_tokens=101", "training.micro_batch_tokens=100"])
    assert "max_tokens=101" in str(caught.value)
    assert "training.micro_batch_tokens=100" in str(caught.value)
    assert SupervisedConfig.load([], ["max_tokens=100", "training.micro_batch_tokens=100"]).max_tokens == 100
