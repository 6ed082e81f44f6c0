import json
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk import files_up_to
from trueline.config.base import ConfigError
from trueline.config.run import CheckpointConfig
from trueline.training.checkpoints import Checkpoints, PollSave, SaveResult, flush


def done(wait: bool) -> SaveResult | None:
    return SaveResult({}, 0.0)


def write_nothing(folder: Path) -> PollSave:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text("w")
    return done


def save(checkpoints: Checkpoints, step: int, *contents: Any) -> Path:
    """Save, wait for it, and return where the checkpoint of this step is, if it could be saved."""
    checkpoints.save(step, *contents)
    checkpoints.settle(wait=True)
    return checkpoints.folder / f"step_{step:06d}"


def warn(notes: list[str]) -> Callable[[str], None]:
    """Keep the warnings among what is said."""
    return lambda note: notes.append(note) if note.startswith("warning") else None


def names(checkpoints: Checkpoints) -> list[str]:
    return [path.name for path in checkpoints.list_finished()]


def test_a_checkpoint_is_named_by_its_step_and_keeps_its_state(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    saved = save(checkpoints, 50, {"step": 50, "groups": 7}, write_nothing)
    assert saved == tmp_path / "checkpoints" / "step_000050" == checkpoints.newest()
    assert checkpoints.read_state(saved) == {"step": 50, "groups": 7}
    assert (saved / "model" / "weights").read_text() == "w"


def test_it_has_another_name_until_all_of_it_is_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    seen: list[list[str]] = []

    def look(folder: Path) -> PollSave:
        assert folder.is_dir()
        assert folder.parent == checkpoints.folder
        seen.append(names(checkpoints))
        return done

    save(checkpoints, 3, {}, look)
    assert seen == [[]]
    assert names(checkpoints) == ["step_000003"]
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_000003"]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """What reaches the disk, in order: flushed or renamed, the path, and how large it was then."""
    calls: list[tuple[str, str, int]] = []
    fsync, rename = os.fsync, os.rename

    def flush(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append(("flush", path, 0 if Path(path).is_dir() else os.fstat(descriptor).st_size))
        fsync(descriptor)

    def move(source: Path, target: Path) -> None:
        calls.append(("rename", str(source), 0))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", move)
    return calls


def test_files_are_on_disk_before_the_name_and_the_name_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut at any moment leaves a checkpoint that is whole: the new one, or the one before it."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    save(checkpoints, 1, {}, write_nothing)
    calls = recorded(monkeypatch)
    saved = save(checkpoints, 2, {"step": 2}, write_nothing)
    aside = str(saved.with_suffix(".unfinished"))
    named = calls.index(("rename", aside, 0))
    inside = [saved, *saved.rglob("*")]
    sizes = {str(path).replace(str(saved), aside): 0 if path.is_dir() else path.stat().st_size for path in inside}
    whole = {("flush", path, size) for path, size in sizes.items()}
    assert len(whole) == 6  # the folder, model, weights, state, metrics and manifest
    assert set(calls[:named]) == whole
    older = ("rename", str(checkpoints.folder / "step_000001"), 0)
    assert calls[named + 1 :] == [("flush", str(checkpoints.folder), 0), older]


def fail(folder: Path) -> PollSave:
    (folder / "stale").write_text("half")
    raise OSError(28, "No space left on device")


def test_a_checkpoint_is_saved_even_if_an_older_one_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1), warn(notes))
    save(checkpoints, 1, {"step": 1}, write_nothing)
    monkeypatch.setattr(Checkpoints, "rotate", lambda self: fail(self.folder))
    saved = save(checkpoints, 2, {"step": 2}, write_nothing)
    assert saved == checkpoints.newest()
    assert checkpoints.failures == 0
    assert "cannot remove older checkpoints ([Errno 28]" in notes[0]


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(tmp_path: Path) -> None:
    notes: list[str] = []
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), warn(notes))
    first = save(checkpoints, 1, {"step": 1}, write_nothing)
    assert not save(checkpoints, 2, {"step": 2}, fail).exists()
    assert checkpoints.failures == 1
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_000001"]
    assert checkpoints.read_state(first) == {"step": 1}
    (note,) = notes
    for part in ("step_000002 could not be saved", "No space left on device", "the run continues", str(first)):
        assert part in note


def test_without_an_older_checkpoint_the_note_says_so(tmp_path: Path) -> None:
    notes: list[str] = []
    assert not save(Checkpoints(tmp_path, CheckpointConfig(), warn(notes)), 1, {}, fail).exists()
    assert "There is no checkpoint yet. Make room on the disk" in notes[0]


def test_a_step_whose_save_failed_can_be_saved_later(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 2, {}, fail)
    saved = save(checkpoints, 2, {}, write_nothing)
    assert saved.exists() and not (saved / "stale").exists()
    assert names(checkpoints) == ["step_000002"]


def test_what_a_kill_left_behind_is_ignored_and_written_anew(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 1, {}, write_nothing)

    def killed(folder: Path) -> PollSave:
        (folder / "stale").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(checkpoints, 2, {}, killed)
    assert names(checkpoints) == ["step_000001"]
    saved = save(checkpoints, 2, {}, write_nothing)
    assert not (saved / "stale").exists()


def test_a_mistake_in_the_program_is_no_broken_disk(tmp_path: Path) -> None:
    def mistaken(folder: Path) -> PollSave:
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        save(Checkpoints(tmp_path, CheckpointConfig()), 1, {}, mistaken)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    for step in (9, 10, 100, 101):
        save(checkpoints, step, {}, write_nothing)
    assert names(checkpoints) == ["step_000100", "step_000101"]


def save_scored(checkpoints: Checkpoints, scores: list[float | None]) -> None:
    """One checkpoint per score; None has none."""
    for step, score in enumerate(scores, 1):
        found = {} if score is None else {"evaluation/loss": score}
        save(checkpoints, step, {}, write_nothing, {"loss": 0.5} | found)


def steps(checkpoints: Checkpoints) -> list[int]:
    return [int(name.removeprefix("step_")) for name in names(checkpoints)]


def test_the_best_stay_besides_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1, keep_best=2))
    save_scored(checkpoints, [0.9, 0.2, 0.5, None, 0.7, None])
    assert steps(checkpoints) == [2, 3, 6]
    assert [path.name for path in checkpoints.best()] == ["step_000002", "step_000003"]


@pytest.mark.parametrize(
    ("best", "metric", "scores", "kept"),
    [
        (2, "-evaluation/loss", [0.9, 0.2, 0.5, 0.1], [1, 3, 4]),  # a minus makes more the better
        (1, "evaluation/loss", [0.5, 0.5, 0.5], [1, 3]),  # of equals, the earlier
        (2, "nonsense", [0.3, 0.2, 0.1], [3]),  # a metric that is not there keeps nothing
        (1, "evaluation/loss", [math.nan, 0.5, math.nan, 0.7], [2, 4]),  # what is no number is never the best
    ],
)
def test_the_metric_tells_the_best(
    best: int, metric: str, scores: list[float | None], kept: list[int], tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1, keep_best=best, metric=metric))
    save_scored(checkpoints, scores)
    assert steps(checkpoints) == kept


def test_the_best_are_found_again_by_another_process(tmp_path: Path) -> None:
    config = CheckpointConfig(keep=1, keep_best=1)
    save_scored(Checkpoints(tmp_path, config), [0.1, 0.4])
    resumed = Checkpoints(tmp_path, config)
    save(resumed, 3, {}, write_nothing, {"evaluation/loss": 0.2})
    assert steps(resumed) == [1, 3]


def test_metrics_are_saved_with_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    saved, bare = save(checkpoints, 1, {}, write_nothing, {"loss": 0.25}), save(checkpoints, 2, {}, write_nothing)
    assert json.loads((saved / "metrics.json").read_text()) == {"loss": 0.25}
    assert json.loads((bare / "metrics.json").read_text()) == {}


def test_a_rotated_checkpoint_goes_as_a_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    save_scored(checkpoints, [None, None])
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_000002"]


def test_a_failed_save_rotates_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    save_scored(checkpoints, [None])
    save(checkpoints, 2, {}, fail)
    assert steps(checkpoints) == [1]


def test_newest_is_by_number_and_not_by_spelling(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    save(checkpoints, 999_999, {}, write_nothing)
    save(checkpoints, 1_000_000, {}, write_nothing)
    assert names(checkpoints) == ["step_1000000"]


def never(folder: Path) -> PollSave:
    raise AssertionError("written twice")


def test_a_step_is_saved_once_and_its_counters_are_renewed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 4, {"step": 4, "groups": 8}, write_nothing)
    again = save(checkpoints, 4, {"step": 4, "groups": 20}, never)
    assert Checkpoints(tmp_path, CheckpointConfig()).read_state(again) == {"step": 4, "groups": 20}
    assert sorted(path.name for path in again.iterdir()) == ["manifest.json", "metrics.json", "model", "state.json"]


OLD, NEW = {"step": 4, "groups": 8}, {"step": 4, "groups": 20}


@pytest.mark.parametrize("operation", range(1, 9))
def test_a_kill_at_any_moment_of_a_renewal_leaves_one_of_the_two(
    tmp_path: Path, operation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the nth thing that is done to the disk; the files are whole and agree with each other."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    saved = save(checkpoints, 4, OLD, write_nothing)
    done = 0

    def counted(act: Any) -> Any:
        def acting(*args: Any, **keys: Any) -> Any:
            nonlocal done
            done += 1
            if done == operation:
                raise KeyboardInterrupt
            return act(*args, **keys)

        return acting

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "write_text", counted(Path.write_text))
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr("trueline.training.checkpoints.flush", counted(flush))
        save(checkpoints, 4, NEW, never)
    renamed = 5  # the counters are written and flushed, the manifest is written, flushed and gets its name
    assert checkpoints.read_state(saved) == (NEW if operation > renamed else OLD)
    assert save(checkpoints, 4, NEW, never) == saved
    assert checkpoints.read_state(saved) == NEW


def test_what_the_disk_refuses_stays_what_it_was(tmp_path: Path) -> None:
    notes: list[str] = []
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), warn(notes))
    saved = save(checkpoints, 4, OLD, write_nothing, {"loss": 1.0})
    with files_up_to(5):
        assert save(checkpoints, 4, NEW, never) == saved
        checkpoints.add_metrics(4, {"evaluation/reward": 0.5})
    assert json.loads((saved / "metrics.json").read_text()) == {"loss": 1.0}
    assert checkpoints.read_state(saved) == OLD
    assert len(notes) == 2 and "cannot write the counters of step_000004" in notes[0]
    assert "cannot write the metrics of step_000004" in notes[1]


def test_due_every_so_many_steps_or_never(tmp_path: Path) -> None:
    every = Checkpoints(tmp_path, CheckpointConfig(every=3))
    assert [step for step in range(1, 10) if every.due(step)] == [3, 6, 9]
    assert not any(Checkpoints(tmp_path, CheckpointConfig(every=0)).due(step) for step in range(1, 10))
    assert every.newest() is None


@pytest.mark.parametrize("text", [None, "{"])
def test_a_folder_without_readable_state_is_named(tmp_path: Path, text: str | None) -> None:
    folder = tmp_path / "checkpoints" / "step_000001"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"step_000001: not a checkpoint"):
        Checkpoints(tmp_path, CheckpointConfig()).read_state(folder)


def test_a_manifest_cut_short_is_named_and_counters_are_guarded_like_any_other_file(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    saved = save(checkpoints, 1, {"step": 1}, write_nothing)
    (saved / "state.json").write_text(json.dumps({"step": 2}))
    with pytest.raises(ConfigError, match=r"state\.json is missing or has changed"):
        checkpoints.read_state(saved)
    manifest = saved / "manifest.json"
    manifest.write_text(manifest.read_text()[:-5])
    with pytest.raises(ConfigError, match=r"step_000001: not a checkpoint of this run .*; remove it to resume"):
        checkpoints.read_state(saved)


@pytest.mark.parametrize("damage", ["altered", "cut", "missing"])
def test_a_damaged_checkpoint_is_named_with_its_file(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    weights = save(checkpoints, 1, {"step": 1}, write_nothing) / "model" / "weights"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_text("v" if damage == "altered" else "")
    with pytest.raises(ConfigError, match=r"step_000001: model/weights is missing or has changed"):
        checkpoints.read_state(weights.parent.parent)


def test_what_is_told_later_decides_which_is_best(tmp_path: Path) -> None:
    config = CheckpointConfig(keep=1, keep_best=1, metric="-evaluation/reward")
    checkpoints = Checkpoints(tmp_path, config)
    for step, reward in ((1, 0.9), (2, 0.1), (3, 0.2)):
        saved = save(checkpoints, step, {"step": step}, lambda folder: done, {"loss": 1.0})
        checkpoints.add_metrics(step, {"evaluation/reward": reward})
        assert json.loads((saved / "metrics.json").read_text()) == {"loss": 1.0, "evaluation/reward": reward}
        assert checkpoints.read_state(saved) == {"step": step}
    assert [path.name for path in checkpoints.list_finished()] == ["step_000001", "step_000003"]


def test_a_metric_that_the_run_does_not_have_is_named_once(tmp_path: Path) -> None:
    notes: list[str] = []
    config = CheckpointConfig(keep_best=1, metric="-evaluation/rewrad")
    checkpoints = Checkpoints(tmp_path, config, warn(notes))
    save(checkpoints, 1, {}, write_nothing, {"loss": 1.0})
    assert not notes  # an evaluation may still come
    for _ in range(2):
        checkpoints.add_metrics(1, {"evaluation/reward": 0.5})
    (note,) = notes
    assert "no metric -evaluation/rewrad (checkpoint.metric)" in note
    assert "evaluation/reward" in note


def test_a_metric_of_training_is_looked_for_at_once(tmp_path: Path) -> None:
    notes: list[str] = []
    for step, metric in ((1, "los"), (2, "loss")):
        config = CheckpointConfig(keep_best=1, metric=metric)
        save(Checkpoints(tmp_path, config, warn(notes)), step, {}, write_nothing, {"loss": 1.0})
        assert len(notes) == 1


class Slow:
    """Writes in the background: done once it is told to be, or waited for."""

    def __init__(self, problem: str | None = None) -> None:
        self.ready, self.waited, self.problem = False, False, problem

    def __call__(self, folder: Path) -> PollSave:
        (folder / "weights").write_text("w")
        return self.look

    def look(self, wait: bool) -> SaveResult | None:
        self.waited = self.waited or (wait and not self.ready)
        return SaveResult({"weights": "as the rank says"}, 2.0, self.problem) if self.ready or wait else None


def test_a_checkpoint_under_way_has_no_name_and_the_next_waits_for_it(tmp_path: Path) -> None:
    notes: list[str] = []
    checkpoints, slow = Checkpoints(tmp_path, CheckpointConfig(keep=1), notes.append), Slow()
    checkpoints.save(1, {"step": 1}, slow)
    checkpoints.settle()
    assert names(checkpoints) == [] and not notes
    slow.ready = True
    checkpoints.settle()
    assert names(checkpoints) == ["step_000001"] and not slow.waited
    manifest = json.loads((checkpoints.folder / "step_000001" / "manifest.json").read_text())
    assert manifest["weights"] == "as the rank says"
    assert re.fullmatch(r"saved +step_000001 in 2 s \(training paused .* s\)", notes[0])
    second, third = Slow(), Slow()
    checkpoints.save(2, {"step": 2}, second)
    assert names(checkpoints) == ["step_000001"] and not second.waited  # the older goes when the newer is there
    checkpoints.save(3, {"step": 3}, third)
    assert names(checkpoints) == ["step_000002"] and second.waited and not third.waited
    checkpoints.save(3, {"step": 3, "groups": 4}, never)  # of the same step: its counters
    assert third.waited and names(checkpoints) == ["step_000003"]
    assert checkpoints.peek(checkpoints.folder / "step_000003")[0] == {"step": 3, "groups": 4}


def test_what_is_told_of_a_checkpoint_under_way_counts_when_it_is_done(tmp_path: Path) -> None:
    config = CheckpointConfig(keep=1, keep_best=1, metric="-evaluation/reward")
    checkpoints = Checkpoints(tmp_path, config)
    for step, reward in ((1, 0.9), (2, 0.1), (3, 0.2)):
        checkpoints.save(step, {}, Slow(), {"loss": 1.0})
        checkpoints.add_metrics(step, {"evaluation/reward": reward})
    checkpoints.settle(wait=True)
    assert names(checkpoints) == ["step_000001", "step_000003"]
    assert checkpoints.newest_metrics() == {"loss": 1.0, "evaluation/reward": 0.2}


def test_a_disk_that_fills_up_in_the_background_costs_that_checkpoint(tmp_path: Path) -> None:
    notes: list[str] = []
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), warn(notes))
    checkpoints.save(1, {}, Slow())
    checkpoints.save(2, {}, Slow("rank 3: No space left on device"))
    checkpoints.save(3, {}, Slow())
    checkpoints.settle(wait=True)
    assert names(checkpoints) == ["step_000001", "step_000003"]
    assert [path.name for path in checkpoints.folder.iterdir() if path.suffix] == []
    assert len(notes) == 1 and "step_000002 could not be saved (rank 3: No space left on device)" in notes[0]
    assert checkpoints.failures == 1


def test_nothing_is_written_where_nothing_is_to_be_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(save=False, every=1))
    assert not checkpoints.due(1)
    checkpoints.save(1, {}, never)
    checkpoints.add_metrics(1, {"loss": 1.0})
    checkpoints.settle(wait=True)
    assert list(tmp_path.iterdir()) == []
