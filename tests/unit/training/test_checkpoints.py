from pathlib import Path

import pytest
import torch

from trueline.config.base import ConfigError
from trueline.config.run import CheckpointConfig
from trueline.training.checkpoints import Checkpoints, load_tensors, save_tensors


def write_nothing(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text("w")


def names(checkpoints: Checkpoints) -> list[str]:
    return [path.name for path in checkpoints.finished()]


def test_a_checkpoint_is_named_by_its_step_and_keeps_its_state(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    saved = checkpoints.save(50, {"step": 50, "groups": 7}, write_nothing)
    assert saved == tmp_path / "checkpoints" / "step_000050" == checkpoints.newest()
    assert checkpoints.read_state(saved) == {"step": 50, "groups": 7}
    assert (saved / "model" / "weights").read_text() == "w"


def test_it_has_another_name_until_all_of_it_is_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    seen: list[list[str]] = []

    def look(folder: Path) -> None:
        assert folder.is_dir()
        assert folder.parent == checkpoints.folder
        seen.append(names(checkpoints))

    checkpoints.save(3, {}, look)
    assert seen == [[]]
    assert names(checkpoints) == ["step_000003"]
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_000003"]


def test_a_checkpoint_that_failed_half_way_is_ignored_and_written_anew(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, {}, write_nothing)

    def fail(folder: Path) -> None:
        (folder / "stale").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(2, {}, fail)
    assert names(checkpoints) == ["step_000001"]
    assert not (checkpoints.save(2, {}, write_nothing) / "stale").exists()
    assert names(checkpoints) == ["step_000001", "step_000002"]


def test_only_the_newest_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    for step in (9, 10, 100, 101):
        checkpoints.save(step, {}, write_nothing)
    assert names(checkpoints) == ["step_000100", "step_000101"]


def test_newest_is_by_number_and_not_by_spelling(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    checkpoints.save(999_999, {}, write_nothing)
    checkpoints.save(1_000_000, {}, write_nothing)
    assert names(checkpoints) == ["step_1000000"]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(4, {"step": 4}, write_nothing)

    def never(folder: Path) -> None:
        raise AssertionError("written twice")

    assert checkpoints.read_state(checkpoints.save(4, {"step": 5}, never)) == {"step": 4}


def test_due_every_so_many_steps_or_never(tmp_path: Path) -> None:
    every = Checkpoints(tmp_path, CheckpointConfig(every=3))
    assert [step for step in range(1, 10) if every.due(step)] == [3, 6, 9]
    assert not any(Checkpoints(tmp_path, CheckpointConfig(every=0)).due(step) for step in range(1, 10))


def test_a_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, CheckpointConfig()).newest() is None


@pytest.mark.parametrize("text", [None, "{"])
def test_a_folder_without_readable_state_is_named(tmp_path: Path, text: str | None) -> None:
    folder = tmp_path / "checkpoints" / "step_000001"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"step_000001: not a checkpoint"):
        Checkpoints(tmp_path, CheckpointConfig()).read_state(folder)


def test_tensors_are_found_by_name_and_part(tmp_path: Path) -> None:
    tensors = {"a.b/weight": torch.arange(6.0).view(2, 3).T, "a.b/exp_avg": torch.ones(2), "c/weight": torch.zeros(1)}
    save_tensors(tmp_path / "t.safetensors", tensors, {"steps": "5"})
    with load_tensors(tmp_path / "t.safetensors") as saved:
        assert saved.metadata["steps"] == "5"
        parts = saved.by_name()
        assert {name: set(part) for name, part in parts.items()} == {"a.b": {"weight", "exp_avg"}, "c": {"weight"}}
        assert torch.equal(saved.read(parts["a.b"]["weight"]), tensors["a.b/weight"])


@pytest.mark.parametrize("damage", ["altered", "cut", "missing"])
def test_a_damaged_checkpoint_is_named_with_its_file(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())

    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_bytes(b"0123456789")

    saved = checkpoints.save(1, {"step": 1}, write)
    weights = saved / "model" / "weights"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(b"0123456788" if damage == "altered" else b"01234")
    with pytest.raises(ConfigError, match=r"step_000001: model/weights is missing or not what was saved"):
        checkpoints.read_state(saved)
