"""A checkpoint that ranks refuse to load: the run says why in the words of a wrong input."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from trueline.config.base import ConfigError
from trueline.config.run import CheckpointConfig
from trueline.monitoring.ledger import Ledger, Pools
from trueline.monitoring.progress import Progress
from trueline.runs.state import RLState, SupervisedState, restore
from trueline.runtime.actors import ActorFailure
from trueline.training.checkpoints import Checkpoints, SaveResult, check_tensors

NAME = "training-00002-of-00002.safetensors"


def test_what_a_checkpoint_saves_is_a_copy_of_all_of_it() -> None:
    ledger = Ledger(3, {2: 9}, {"trained": 2}, {"trained": [0, 1]}, Pools({1: 2}, {2: 4}, {2: 3}))
    state = RLState(step=2, ledger=ledger, tracker={"wandb": "x"})
    saved, expected = state.snapshot(), json.loads(json.dumps(asdict(state)))
    assert saved == asdict(state)
    for changed in (ledger.pools.easy, ledger.pools.hard, ledger.pools.left, ledger.fates, ledger.under_way):
        changed.clear()
    assert json.loads(json.dumps(saved)) == expected != json.loads(json.dumps(state.snapshot()))


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
