"""What the doctor's exit status says: 1 where a run would not start or is bad, and 0 where it only asks for a look."""

from pathlib import Path
from typing import Any

import pytest

import trueline.cli
from trueline.cli import main
from trueline.config.supervised import SftConfig
from trueline.doctor import examination
from trueline.doctor.examination import Planned, checked, examine, said_at_start
from trueline.doctor.findings import LEVELS, Finding, show
from trueline.runs.preflight import Reading

DONE: Any = None
PLAN: Any = object()


@pytest.mark.parametrize(("level", "status"), [("refused", 1), ("bad", 1), ("watch", 0), ("fine", 0)])
def test_the_worst_finding_is_the_status(level: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever it stands, and beside any number of better ones."""
    fine = [Finding("fine", "well")] * 3
    assert show({"plan": fine, "data": [*fine, Finding(level, "this")]}) == status
    assert show({"plan": [Finding(level, "this"), *fine], "data": []}) == status
    counted = {name: 3 * (name == "fine") + (name == level) for name in LEVELS}
    assert ", ".join(f"{count} {name}" for name, count in counted.items()) in capsys.readouterr().out


@pytest.mark.parametrize("level", LEVELS)
def test_the_command_hands_the_status_and_its_flags_on(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def examined(verb: str, config: Any, **how: bool) -> dict[str, list[Finding]]:
        asked.append((verb, config.steps, how))
        return {"plan": [Finding(level, "this")]}

    monkeypatch.setattr(trueline.cli, "examine", examined)
    assert main(["doctor", "sft", "steps=3", "--deep"]) == int(level in ("refused", "bad"))
    assert asked == [("sft", 3, {"resume": False, "deep": True})]
    assert main(["doctor", "sft", "steps=none"]) == 1 and len(asked) == 1  # refused before there is a run to look at


def planned_as(monkeypatch: pytest.MonkeyPatch, *said: Finding, plan: Any = PLAN) -> list[Any]:
    """Have a run planned like this, with one check that finds something of each level; return what is tried."""
    tried: list[Any] = []
    reading: Any = object()
    case: Any = type("Case", (), {"rows": [1], "chat": 1, "facts": 1, "config": SftConfig()})()
    monkeypatch.setattr(examination, "planned", lambda *given, **how: Planned(SftConfig(), list(said), reading, plan))
    monkeypatch.setattr(examination, "case_of", lambda config, reading: case)
    monkeypatch.setattr(examination, "FAMILIES", {"data": (lambda case: [Finding("bad", "found", "", "data.path")],)})
    monkeypatch.setattr(
        "trueline.doctor.deep.try_run", lambda plan, verb: tried.append(verb) or [Finding("fine", "ran")]
    )
    return tried


def test_a_step_is_tried_of_runs_that_would_start_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = planned_as(monkeypatch)
    assert "deep" not in examine(SftConfig(), "sft", "") and tried == []
    found = examine(SftConfig(), "sft", "", deep=True)
    assert found["deep"] == [Finding("fine", "ran")] and tried == ["sft"]  # a bad finding keeps nothing from starting
    assert found["plan"] == [Finding("fine", "the run would start")]
    for said, plan in (([Finding("refused", "no")], object()), ([], None)):
        tried = planned_as(monkeypatch, *said, plan=plan)
        (deep,) = examine(SftConfig(), "sft", "", deep=True)["deep"]
        assert (deep.level, tried) == ("watch", []) and "nothing was tried" in deep.what


def test_a_refusal_stays_and_a_remark_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, remark = Finding("refused", "no", "", "data.path"), Finding("watch", "long rows", "", "data.path")
    other = Finding("watch", "slow", "", "steps")
    planned_as(monkeypatch)
    plan = checked(Planned(SftConfig(), [refused, remark, other], Reading(DONE, DONE, [], [])))["plan"]
    assert plan == [refused, other]  # the check of the data speaks of that key
    monkeypatch.setattr(
        examination,
        "FAMILIES",
        {"data": (lambda case: [Finding(level, f"{level} finding of the rows") for level in LEVELS],)},
    )
    lines = said_at_start(SftConfig(), Reading(DONE, DONE, [], []), "the plan says: watch finding of the rows")
    assert lines == ["doctor     bad: bad finding of the rows"]


def test_a_folder_that_exists_is_refused_unless_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = SftConfig.parse({"folder": str(tmp_path), "name": "first"})
    plan: Any = type("Plan", (), {"config": config, "reading": Reading(DONE, DONE, [], [])})()
    monkeypatch.setattr(examination, "plan_of", lambda *given: (plan, "warning: look\nelse"))
    monkeypatch.setattr(examination, "check_trackers", lambda monitoring: None)
    monkeypatch.setattr(examination, "chained", lambda config: (config, None))
    assert [one.what for one in examination.planned(config, "sft", "", resume=False).said] == ["look"]
    (tmp_path / "first").mkdir()
    (said,) = examination.planned(config, "sft", "", resume=False).said
    assert said.level == "refused" and "add --resume" in said.what
    assert [one.level for one in examination.planned(config, "sft", "", resume=True).said] == ["watch"]
