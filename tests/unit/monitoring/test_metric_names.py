"""The table of metrics has every name that a run reports, and no other."""

from pathlib import Path

import pytest

from tests.support.generated_docs import ROOT
from trueline.config.run import MonitoringConfig
from trueline.monitoring.findings import CODES
from trueline.monitoring.health import RULES
from trueline.monitoring.metrics import CHARTS, METRICS, NAMES, SHOWN, is_known
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.trackers import Tracker


def test_every_name_is_in_the_code() -> None:
    """By its last part, for prefixes are put in front of some."""
    code = "\n".join(file.read_text() for file in (ROOT / "trueline").rglob("*.py"))
    ends = {one.name: one.name.rpartition("/")[2] for one in METRICS if ".+" not in one.pattern()}
    assert len(ends) > 80
    phases = {f"{phase}_gib" for phase in ("start", "training", "rollout")}  # whose names are put together
    assert [name for name, end in ends.items() if f'{end}"' not in code and end not in phases] == []


def test_the_table_is_whole() -> None:
    assert len(NAMES) == len(METRICS) > 120 and {CODES[rule].section for rule in RULES} == {"Every step"}
    assert {one.better for one in METRICS} == {"higher", "lower", ""} and all(one.meaning for one in METRICS)
    assert NAMES["reward/mean"].better == "higher" and NAMES["loss"].better == "lower"
    assert len(CHARTS) > 20 and all(f"{1.0:{one.form}}" for one in SHOWN)


def test_a_run_may_report_no_other_name(tmp_path: Path) -> None:
    tracker = Tracker(RunFolder(tmp_path), MonitoringConfig(tensorboard=False))
    tracker.log(1, {"time/step": 1.0, "reward/part/style": 0.5})
    with pytest.raises(AssertionError, match="reward/new"):
        tracker.log(2, {"time/step": 1.0, "reward/new": 0.5})
    names = ["reward/mean", "reward/mean/", "engine/0/requests", "rewards"]
    assert [name for name in names if not is_known(name)] == ["reward/mean/", "rewards"]
