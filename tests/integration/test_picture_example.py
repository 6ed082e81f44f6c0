"""The example of pictures: a model that named colours at random learns to look, on Ray, vLLM and DeepSpeed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trueline.files import read_rows

ROOT = Path(__file__).resolve().parents[2]
BEFORE, AFTER, CHANCE = 0.4, 0.85, 0.45  # of three colours


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_small_model_learns_to_look_at_pictures(seed: str, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(ROOT / "examples" / "pictures" / "run.sh"), str(tmp_path / "run")]
    made = subprocess.run(command, env={**os.environ, "PATH": path, "SEED": seed}, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-3000:]
    rows = read_rows(tmp_path / "run" / "grpo" / "metrics.jsonl")
    first, last = (one for one in (rows[0], rows[-1]))
    assert first["evaluation/held_out/reward"] < BEFORE
    assert last["evaluation/held_out/reward"] > AFTER
    assert last["evaluation/exchanged/reward"] < CHANCE  # it answers by the picture, which is another's
    trained = [row["mismatch/logprob_gap_max"] for row in rows if "mismatch/logprob_gap_max" in row]
    assert trained and max(trained) < 1e-3
