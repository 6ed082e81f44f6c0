"""Seconds of `trueline doctor` on 10,000 rows: the whole command, and the examination without imports.

    python benchmarks/doctor.py [--rows 10000] [--rounds 3]

Processor time counts this process and its children; use it if other programs run too.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from trueline.cli import main as trueline
from trueline.demo.material import make_model


def make_home(folder: Path, rows: int) -> list[str]:
    """Make a model and rows about as long as those of GSM8K, and return the words of the command."""
    make_model(folder / "model", seed=0)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 1024}))
    asked = "A shop sells {0} boxes of {1} pens on each of five days, and then {0} more. How many pens has it sold? "
    lines = [{"prompt": (2 * asked).format(row, row % 7) + "=", "answer": str(row * (row % 7))} for row in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ["--model", f"{folder}/model", "--data", f"{folder}/rows.jsonl", "--reward", "math"]
    return ["doctor", "grpo", *files, f"folder={folder}/runs", "rollout.max_new_tokens=64"]


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """On the wall's clock, and on the processor's."""
    wall, before = time.perf_counter(), os.times()
    work()
    after = os.times()
    return time.perf_counter() - wall, sum(after[:4]) - sum(before[:4])


def in_process(words: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        status = trueline(words)
    assert status == 0, f"exit status {status}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = make_home(Path(folder), options.rows)
        command = [sys.executable, "-m", "trueline.cli", *words]
        whole = lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: E731
        in_process(words)  # imports
        for name, work in {"whole command": whole, "examination": lambda: in_process(words)}.items():
            wall, processor = zip(*(seconds(work) for _ in range(options.rounds)), strict=True)
            print(f"{name}: {median(wall):.2f} s, processor time {median(processor):.2f} s ({options.rows} rows)")


if __name__ == "__main__":
    main()
