"""On a GPU: FSDP2 trains like DeepSpeed and a bare loop: plain, checkpointed, compiled, with moments on the host."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["none", "moments", "all"])
def test_every_mode_of_every_engine(offload: str, tmp_path: Path) -> None:
    """The script compares the losses of all sides."""
    words = (
        "--shape tiny --samples 4 --longest 96 --tokens 256 --steps 1 --rounds 1 --modes compiled plain checkpointed"
    )
    command = [sys.executable, "benchmarks/training_engines.py", *words.split(), "--offload", offload]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "found")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(len(sides) == 3 for sides in json.loads((tmp_path / "found").read_text())["modes"].values())
