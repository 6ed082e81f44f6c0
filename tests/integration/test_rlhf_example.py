"""examples/rlhf, start to end: PPO and DPO both raise the true accuracy of their SFT start."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ppo_and_dpo_raise_the_true_reward(tmp_path: Path) -> None:
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = [str(ROOT / "examples" / "rlhf" / "run.sh"), str(tmp_path / "rlhf")]
    ended = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    runs = tmp_path / "rlhf" / "runs"
    files = {name: runs / f"eval-{name}" / "evaluation.json" for name in ("sft", "ppo", "dpo")}
    accuracy = {name: json.loads(file.read_text())["metrics"]["evaluation/reward"] for name, file in files.items()}
    assert accuracy["ppo"] > accuracy["sft"] + 0.1, accuracy
    assert accuracy["dpo"] > accuracy["sft"] + 0.1, accuracy
