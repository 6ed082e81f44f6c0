"""What `health.action` does after bad steps."""

import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.config.run import CheckpointConfig, MonitoringConfig, RunConfig
from trueline.monitoring.ledger import Ledger
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.trackers import Tracker
from trueline.runs.guard import TrainingFailure
from trueline.runs.interrupts import Interrupts
from trueline.runs.launch import with_lower_rates
from trueline.runs.rescue import GO_ON, PROVEN, HealthAction, RolledBack, care_of
from trueline.runs.state import RLState, SupervisedState
from trueline.training.checkpoints import Checkpoints, SaveResult

FALLING = [{"reward/mean": 0.5} if step < 8 else {"reward/mean": 0.0} for step in range(1, 21)]


class Patient:
    """A run of some steps whose rewards fall, with checkpoints of a few bytes."""

    def __init__(self, folder: Path, action: str, every: int = 2, keep: int = 2) -> None:
        self.said: list[str] = []
        self.checkpoints = Checkpoints(folder, CheckpointConfig(every=every, keep=keep), self.said.append)
        config = RunConfig.parse({"health": {"action": action}})
        progress = Progress("run", 20, Console(quiet=True))
        self.care: HealthAction = care_of(config, RunFolder(folder), self.checkpoints, progress)
        self.state, self.interrupts = RLState(), Interrupts(self.said.append)
        folder.mkdir(exist_ok=True)
        self.tracker = Tracker(RunFolder(folder), MonitoringConfig(tensorboard=False))

    def save(self) -> None:
        def write(folder: Path) -> Any:
            (folder / "weights").write_text(str(self.state.step))
            return lambda wait: SaveResult({}, 0.0)

        self.checkpoints.save(self.state.step, asdict(self.state), write)
        self.checkpoints.settle(wait=True)

    def live(self, rows: list[dict[str, float]] = FALLING) -> None:
        self.care.begin(self.save)
        for row in rows:
            number = self.state.ledger.draw(self.state.step)
            self.state.advance([number], True)
            self.tracker.account(self.state.step, self.state.ledger.row())
            if self.checkpoints.due(self.state.step):
                self.save()
            self.care.monitor.check(self.state.step, row)
            self.care.act(self.state, self.save, self.interrupts)

    def steps(self) -> list[int]:
        return [int(path.name[5:]) for path in self.checkpoints.list_finished()]


def test_nothing_is_done_by_default(tmp_path: Path) -> None:
    patient = Patient(tmp_path, "log")
    patient.live()
    assert patient.state.step == 20 and patient.steps() == [18, 20]


def test_a_bad_run_stops_where_that_is_asked_for(tmp_path: Path) -> None:
    Patient(tmp_path / "sound", "stop").live([{"reward/mean": 0.5}] * 20)
    with pytest.raises(TrainingFailure, match=r"health is bad \(reward\); --resume with health.action=log"):
        Patient(tmp_path / "bad", "stop").live()


def test_a_run_goes_back_to_where_it_began(tmp_path: Path) -> None:
    """Too few steps have passed since the other checkpoints to call them healthy."""
    patient = Patient(tmp_path, "roll_back")
    with pytest.raises(RolledBack):
        patient.live()
    assert patient.steps() == [0] and 8 <= patient.state.step < 20
    counters = patient.checkpoints.read_state(patient.checkpoints.list_finished()[0])
    ledger = Ledger.of(counters["ledger"])
    assert counters["rolled_back"] == 1 and counters["step"] == 0
    assert ledger.fates == {"trained": 0, "rolled_back": patient.state.step} and ledger.drawn == patient.state.step
    ledger.balance()
    assert any(
        "Rolled back from step" in line and "(1 of 2 times); learning rates x 0.1" in line for line in patient.said
    )


def test_a_healthy_checkpoint_outlives_newer_ones_and_is_gone_back_to(tmp_path: Path) -> None:
    patient = Patient(tmp_path, "roll_back")
    sound = [{"reward/mean": 0.5}] * 20
    with pytest.raises(RolledBack):
        patient.live([*sound, *[{"reward/mean": 0.0}] * 10])
    healthy, newest = patient.steps()[-1], patient.checkpoints.list_finished()[-1]
    assert 0 < healthy <= patient.state.step - PROVEN
    assert (newest / "weights").read_text() == str(healthy)
    ledger = Ledger.of(patient.checkpoints.read_state(newest)["ledger"])
    assert ledger.fates == {"trained": healthy, "rolled_back": patient.state.step - healthy}
    ledger.balance()
    assert ledger.row() == {"rolled_back": list(range(healthy, patient.state.step))}


def test_the_next_row_of_the_ledger_lists_all_that_was_told_of_given_up_steps() -> None:
    before = Ledger(drawn=4, under_way={3: 3}, fates={"trained": 3})
    now = Ledger(12, {11: 0}, {"trained": 7, "uniform": 2, "rolled_back": 1, "too_old": 1}, {"too_old": [9]})
    rows = [{"trained": [4, 3], "rolled_back": [5]}, {"trained": [6, 10], "uniform": [7, 8]}]
    back = now.roll_back(before, rows)
    assert back.row() == {"rolled_back": [4, 3, 5, 6, 10], "uniform": [7, 8], "too_old": [9]}
    assert back.balance() == "12 prompts sampled: 3 trained, 2 uniform, 5 rolled back, 1 too old, 1 in flight"


def test_all_rates_are_lower_after_it() -> None:
    ppo = RLConfig.parse({"training": {"learning_rate": 1e-3}, "critic": {"learning_rate": 1e-2}})
    lower = with_lower_rates(ppo, ppo)
    assert (lower.training.learning_rate, lower.critic.learning_rate) == pytest.approx((1e-4, 1e-3))
    kept = ppo.with_keys({"health": {"rate_factor": 1.0}})
    assert with_lower_rates(kept, kept) == kept
    left_to_the_plan = with_lower_rates(RLConfig(), RLConfig.parse({"training": {"learning_rate": 1e-3}}))
    assert left_to_the_plan.training.learning_rate == pytest.approx(1e-4)
    assert left_to_the_plan.critic.learning_rate is None


def test_a_run_goes_back_twice_at_most(tmp_path: Path) -> None:
    patient = Patient(tmp_path, "roll_back")
    patient.state.rolled_back = 2
    with pytest.raises(TrainingFailure, match="rolled back 2 times"):
        patient.live()


def test_rows_of_given_up_steps_are_not_trained_on_again() -> None:
    saved = asdict(SupervisedState(step=4, rows=40))
    assert SupervisedState(step=9, rows=90).behind(saved, []) == saved | {"rows": 90, "rolled_back": 1}


def test_a_pause_lasts_until_a_person_goes_on(tmp_path: Path) -> None:
    patient = Patient(tmp_path, "pause", every=0)
    running = threading.Thread(target=patient.live)
    running.start()
    while not any("Paused" in line for line in patient.said):
        running.join(0.05)
    paused = patient.state.step
    assert 8 <= paused < 20 and patient.steps() == [paused]  # nothing is lost, whatever is decided
    (tmp_path / GO_ON).touch()
    running.join()
    assert patient.state.step == 20 and not (tmp_path / GO_ON).exists()
    assert sum("Paused" in line for line in patient.said) == 1  # the same rule is not asked about again


def test_an_interrupt_ends_a_pause(tmp_path: Path) -> None:
    patient = Patient(tmp_path, "pause")
    patient.interrupts.signalled = True
    patient.live()


def test_a_run_that_goes_on_is_judged_by_what_it_reported_before(tmp_path: Path) -> None:
    rows = [f'{{"step": {step}, "reward/mean": 0.5}}\n' for step in range(8)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    patient = Patient(tmp_path, "stop")
    with pytest.raises(TrainingFailure):
        patient.live([{"reward/mean": 0.0}] * 5)
    assert len(patient.care.monitor.history.series["reward/mean"].last) <= 12


def test_going_back_needs_checkpoints() -> None:
    with pytest.raises(ConfigError, match=r"health.action=roll_back.*checkpoint.save=true"):
        RLConfig.parse({"health": {"action": "roll_back"}, "checkpoint": {"save": False}})
