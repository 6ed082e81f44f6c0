"""The list of metrics: docs/metrics.md has every name that a run reports, and no other."""

from pathlib import Path

import pytest

from tests.support.metric_names import ANY, ROOT, documented, undocumented
from trueline.config.run import MonitoringConfig
from trueline.monitoring.health import RULES
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.trackers import Tracker


def test_every_name_is_in_the_code() -> None:
    """By its last part, for prefixes are put in front of some."""
    code = "\n".join(file.read_text() for file in (ROOT / "trueline").rglob("*.py"))
    ends = {name: name.rpartition("/")[2] for name in documented() if not ANY.search(name)}
    assert len(ends) > 80
    phases = {f"{phase}_gib" for phase in ("start", "training", "rollout")}  # whose names are put together
    assert [name for name, end in ends.items() if f'{end}"' not in code and end not in phases] == []


def test_every_rule_is_described() -> None:
    table = (ROOT / "docs/metrics.md").read_text().partition("| rule |")[2].partition("## ")[0]
    assert [name for name in RULES if f"| `{name}`" not in table] == []


def test_a_run_may_report_no_other_name(tmp_path: Path) -> None:
    tracker = Tracker(RunFolder(tmp_path), MonitoringConfig(tensorboard=False))
    tracker.log(1, {"time/step": 1.0, "reward/part/style": 0.5})
    with pytest.raises(AssertionError, match="reward/new"):
        tracker.log(2, {"time/step": 1.0, "reward/new": 0.5})
    assert undocumented(["reward/mean", "reward/mean/", "engine/0/requests", "rewards"]) == ["reward/mean/", "rewards"]
