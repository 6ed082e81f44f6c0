"""The demo, start to end, as a newcomer sees it."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_learns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trueline.cli", "demo", "--steps", "30", "--folder", str(tmp_path / "demo")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    gain = re.search(r"gain: \+([0-9.]+) points greedy, \+([0-9.]+) points sampled", ended.stdout)
    assert gain is not None, ended.stdout
    assert float(gain[1]) >= 20 and float(gain[2]) >= 20, gain[0]
    assert "grpo 30/30 " in ended.stdout
    assert "└──" in ended.stdout.split(gain[0])[1], "the curve comes last"
    assert ET.parse(tmp_path / "demo/curve.svg").getroot().tag.endswith("svg")
    assert not re.search(r"WARNING|DEBUG|\(raylet\)|\(EngineCore", ended.stdout + ended.stderr)
