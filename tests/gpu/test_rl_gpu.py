"""On one CUDA device: GRPO runs to its end and the weights arrive after every update."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
def test_five_steps_of_a_half_billion_parameter_shape(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_rl.py", str(tmp_path / "run"), "rollout.max_new_tokens=256"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
