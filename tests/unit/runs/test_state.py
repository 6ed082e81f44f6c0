"""A checkpoint that ranks refuse to load: the run says why in the words of a wrong input."""

from pathlib import Path

import pytest

from trueline.config.base import ConfigError
from trueline.config.run import CheckpointConfig
from trueline.monitoring.progress import Progress
from trueline.runs.state import SupervisedState, restore
from trueline.runtime.actors import ActorFailure
from trueline.training.checkpoints import Checkpoints, SaveResult, check_tensors

NAME = "training-00002-of-00002.safetensors"


def test_a_damaged_file_is_named_as_if_the_driver_had_found_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, {"tracker": {}}, lambda folder: lambda wait: SaveResult({NAME: "of other bytes"}, 0.0))
    assert checkpoints.pending is not None
    (checkpoints.pending.temporary / NAME).write_text("tensors")
    checkpoints.settle(wait=True)
    ranks: list[str] = []

    def load(checkpoint: Path) -> None:
        for rank in range(2):
            try:
                check_tensors(checkpoint, rank, 2)
            except ConfigError as error:
                ranks.append(str(error))
                raise ActorFailure(f"policy-{rank}: ConfigError: {error}; see policy-{rank}.log") from None

    def lose(checkpoint: Path) -> None:
        raise ActorFailure("policy-1 is gone")

    with pytest.raises(ConfigError) as refused:
        restore(SupervisedState, checkpoints, load, Progress("run", 1))
    assert ranks == [str(refused.value)]
    assert str(refused.value).startswith(f"{checkpoints.newest()}: {NAME} is missing or has changed; remove the folder")
    with pytest.raises(ActorFailure, match="policy-1 is gone"):
        restore(SupervisedState, checkpoints, lose, Progress("run", 1))
