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
