"""What the doctor's exit status says: 1 where a run would not start or is bad, and 0 where it only asks for a look."""

from pathlib import Path
from typing import Any

import pytest

import trueline.cli
from trueline.cli import main
from trueline.config.supervised import SftConfig
from trueline.doctor import examination
from trueline.doctor.examination import Planned, examine, findings_at_start, run_checks
from trueline.doctor.table import show
from trueline.monitoring.findings import LEVELS, Finding
from trueline.plan.inputs import Reading

DONE: Any = None
PLAN: Any = object()


@pytest.mark.parametrize(("level", "status"), [("refused", 1), ("bad", 1), ("watch", 0), ("fine", 0)])
def test_the_worst_finding_is_the_status(level: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever it is, and among any number of better ones."""
    fine = [Finding("fine", "well", "well")] * 3
    assert show({"plan": fine, "data": [*fine, Finding(level, "this", "this")]}) == status
    assert show({"plan": [Finding(level, "this", "this"), *fine], "data": []}) == status
    counted = {name: 3 * (name == "fine") + (name == level) for name in LEVELS}
    assert ", ".join(f"{count} {name}" for name, count in counted.items()) in capsys.readouterr().out


@pytest.mark.parametrize("level", LEVELS)
def test_the_command_hands_the_status_and_its_flags_on(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def examined(verb: str, config: Any, **how: bool) -> dict[str, list[Finding]]:
        asked.append((verb, config.steps, how))
        return {"plan": [Finding(level, "this", "this")]}

    monkeypatch.setattr(trueline.cli, "examine", examined)
    assert main(["doctor", "sft", "steps=3", "--deep"]) == int(level in ("refused", "bad"))
    assert asked == [("sft", 3, {"resume": False, "deep": True})]
    assert main(["doctor", "sft", "steps=none"]) == 1 and len(asked) == 1  # refused before there is a run to look at


def planned_as(monkeypatch: pytest.MonkeyPatch, *said: Finding, plan: Any = PLAN) -> list[Any]:
    """Have a run planned like this, with one check that finds something of each level; return what is tried."""
    tried: list[Any] = []
    reading: Any = object()
    case: Any = type("Case", (), {"rows": [1], "chat": 1, "facts": 1, "config": SftConfig()})()
    monkeypatch.setattr(examination, "try_plan", lambda *given, **how: Planned(SftConfig(), list(said), reading, plan))
    monkeypatch.setattr(examination, "case_of", lambda config, reading: case)
    monkeypatch.setattr(examination, "FAMILIES", {"data": ("rows", (lambda case: [Finding("bad", "found", "found")],))})
    monkeypatch.setattr(
        "trueline.doctor.deep.try_run", lambda plan, verb: tried.append(verb) or [Finding("fine", "ran", "ran")]
    )
    return tried


def test_a_step_is_tried_of_runs_that_would_start_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = planned_as(monkeypatch)
    assert "deep" not in examine(SftConfig(), "sft", "") and tried == []
    found = examine(SftConfig(), "sft", "", deep=True)
    assert found["deep"] == [Finding("fine", "ran", "ran")] and tried == ["sft"]  # though one finding is bad
    assert [one.code for one in found["plan"]] == ["would_start"]
    for said, plan in (([Finding("refused", "no", "no")], object()), ([], None)):
        tried = planned_as(monkeypatch, *said, plan=plan)
        (deep,) = examine(SftConfig(), "sft", "", deep=True)["deep"]
        assert (deep.level, deep.code, tried) == ("watch", "not_tried", [])


def test_a_refusal_stays_and_a_remark_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, same, other = (
        Finding("refused", "found", "no"),
        Finding("watch", "found", ""),
        Finding("watch", "other", ""),
    )
    planned_as(monkeypatch)
    plan = run_checks(Planned(SftConfig(), [refused, same, other], Reading(DONE, DONE, [], [])))["plan"]
    assert plan == [refused, other]  # the check of the data has found the same
    monkeypatch.setattr(
        examination,
        "FAMILIES",
        {"data": ("rows", (lambda case: [Finding(level, level, "of the rows") for level in LEVELS],))},
    )
    found = findings_at_start(SftConfig(), Reading(DONE, DONE, [], []), [Finding("watch", "watch", "in the plan")])
    assert [one.level for one in found] == ["bad"]


LOOK = Finding("watch", "look", "look")


def test_a_folder_that_exists_is_refused_unless_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = SftConfig.parse({"folder": str(tmp_path), "name": "first"})
    plan: Any = type("Plan", (), {"config": config, "reading": Reading(DONE, DONE, [], []), "findings": [LOOK]})()
    monkeypatch.setattr(examination, "plan_of", lambda *given: plan)
    monkeypatch.setattr(examination, "check_trackers", lambda monitoring: None)
    monkeypatch.setattr(examination, "resolve_run_as_model", lambda config: (config, None))
    assert [one.what for one in examination.try_plan(config, "sft", "", resume=False).findings] == ["look"]
    (tmp_path / "first").mkdir()
    (said,) = examination.try_plan(config, "sft", "", resume=False).findings
    assert (said.level, said.key) == ("refused", "name") and "add --resume" in said.what
    assert [one.level for one in examination.try_plan(config, "sft", "", resume=True).findings] == ["watch"]
