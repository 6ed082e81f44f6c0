"""The one way into a run: its name and folder, a dry run, what is said of failures, and how training ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trueline.config.base import ConfigError
from trueline.config.run import RunConfig
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.rollout.failures import RolloutFailure
from trueline.runs.guard import TrainingFailure
from trueline.runs.launch import Job, Start, launch, training
from trueline.runs.state import SupervisedState
from trueline.runtime.actors import ActorFailure
from trueline.sync.weights import SyncFailure


class Planned:
    """Prepares a job that ends as it is told, and remembers what it was given."""

    def __init__(self, end: int | Exception = 0, trains: bool = False) -> None:
        self.end, self.trains = end, trains
        self.starts: list[tuple[str | None, Start]] = []

    def __call__(self, config: RunConfig, start: Start) -> Job:
        self.starts.append((config.name, start))
        return Job(config.with_keys({"seed": 7}), "work       of a test", 3, self.work, self.trains)

    def work(self, folder: RunFolder, progress: Progress) -> int:
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


def asked(folder: Path, name: str | None = "run") -> RunConfig:
    return RunConfig(folder=str(folder), name=name)


def way_on(folder: Path) -> str:
    return f"trueline verb --resume --name run folder={folder}"


def test_a_run_without_a_name_gets_one_from_its_verb(tmp_path: Path) -> None:
    planned = Planned(130)
    assert launch(asked(tmp_path, None), "verb", planned) == 130
    ((name, start),) = planned.starts
    assert name is not None and name.startswith("verb-")
    assert (start.folder.path, start.verb, start.resume) == (tmp_path / name, "verb", False)
    saved = RunConfig.load([start.folder.config], [])
    assert (saved.name, saved.seed) == (name, 7)  # as it was planned, not as it was asked for


def test_a_dry_run_says_what_a_run_would_and_leaves_nothing(tmp_path: Path, capsys: Any) -> None:
    assert launch(asked(tmp_path), "verb", Planned(), dry_run=True) == 0
    shown = capsys.readouterr().out
    assert "seed: 7\n" in shown and shown.endswith("\nwork       of a test\n")
    assert not list(tmp_path.iterdir())
    assert launch(asked(tmp_path), "verb", Planned()) == 0
    assert capsys.readouterr().out == f"work       of a test\nrun        {tmp_path / 'run'}\n"


def test_a_run_that_is_there_is_taken_up_only_when_asked(tmp_path: Path) -> None:
    planned = Planned()
    assert launch(asked(tmp_path), "verb", planned) == 0
    with pytest.raises(ConfigError, match="exists: add --resume"):
        launch(asked(tmp_path), "verb", planned)
    assert launch(asked(tmp_path), "verb", planned, resume=True) == 0
    assert [start.resume for _, start in planned.starts] == [False, False, True]


@pytest.mark.parametrize("kind", [ActorFailure, RolloutFailure, SyncFailure, TrainingFailure])
def test_a_failure_is_said_with_the_way_on(tmp_path: Path, capsys: Any, kind: type[Exception]) -> None:
    assert launch(asked(tmp_path), "verb", Planned(kind("engine-0 is gone"))) == 1
    *_, error, remedy = capsys.readouterr().out.splitlines()
    assert (error, remedy) == ("error: engine-0 is gone", f"Continue with: {way_on(tmp_path)}")


def test_training_goes_on_from_a_checkpoint_alone(tmp_path: Path, capsys: Any) -> None:
    planned = Planned(TrainingFailure("not finite"), trains=True)
    assert launch(asked(tmp_path), "verb", planned) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "error: not finite"
    assert launch(asked(tmp_path), "verb", planned, resume=True) == 1
    assert "resume     no checkpoint yet: starts over at step 0" in capsys.readouterr().out
    (tmp_path / "run" / "checkpoints" / "step_000002").mkdir(parents=True)
    assert launch(asked(tmp_path), "verb", planned, resume=True) == 1
    shown = capsys.readouterr().out
    assert shown.endswith(f"Continue from the last checkpoint with: {way_on(tmp_path)}\n")
    assert "no checkpoint yet" not in shown


def test_what_is_no_failure_of_a_run_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        launch(asked(tmp_path), "verb", Planned(ZeroDivisionError()))


class Trained:
    def __init__(self, step: int) -> None:
        self.step = step

    def fit(self) -> SupervisedState:
        return SupervisedState(self.step)


@pytest.mark.parametrize(
    ("step", "saved", "status", "said"),
    [
        (5, 5, 0, "done: step 5 of 5; model in "),
        (3, 3, 130, "stopped: step 3 of 5; model in "),
        (5, 4, 1, "error: step 5 is trained but not saved; the last checkpoint is "),
        (5, None, 1, "error: step 5 is trained but not saved; the last checkpoint is None"),
    ],
)
def test_training_ends_well_where_its_last_step_is_saved(
    tmp_path: Path, capsys: Any, monkeypatch: Any, step: int, saved: int | None, status: int, said: str
) -> None:
    closed = []

    @contextmanager
    def trainer(folder: RunFolder, progress: Progress) -> Iterator[Trained]:
        if saved is not None:
            (folder.checkpoints / f"step_{saved:06d}").mkdir(parents=True)
        yield Trained(step)
        closed.append(folder.path)

    def prepare(config: Any, start: Any) -> Job:
        return training(SimpleNamespace(config=config, findings=[], reading=lambda: None), 5, trainer)  # type: ignore[arg-type]

    monkeypatch.setattr("trueline.runs.launch.describe", lambda plan: "")
    assert launch(asked(tmp_path), "verb", prepare) == status
    *_, before, last = capsys.readouterr().out.splitlines()
    if status == 130:
        assert last == f"continue with: {way_on(tmp_path)}"
    assert (before if status == 130 else last).startswith(said)
    assert closed == [tmp_path / "run"]
