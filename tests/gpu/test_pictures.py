"""On one CUDA device: vLLM and the trainer see the same pictures, in families that need torchvision."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_pictures_add_little_to_the_gap_of_logprobs(family: str, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_pictures.py", str(tmp_path / "run"), "--family", family, "--steps", "0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
