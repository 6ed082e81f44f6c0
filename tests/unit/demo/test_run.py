"""What the demo shows of its runs."""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from trueline.demo.run import show_result


def test_both_accuracies_completions_and_the_curve_are_shown(tmp_path: Path) -> None:
    metrics = [{"step": step, "reward/mean": 0.6 + step / 10} for step in range(1, 4)]
    metrics[-1]["evaluation/reward"] = 0.95
    write(tmp_path / "grpo/metrics.jsonl", {"step": 0, "evaluation/reward": 0.5}, *metrics)
    shared = {"purpose": "evaluate", "prompt": "47+5="}
    other = {"step": 0, "purpose": "train", "prompt": "1+1=", "reply": "2", "reward": 1.0}
    old, new = (
        {**shared, "step": 0, "reply": "42", "reward": 0.0},
        {**shared, "step": 3, "reply": "52", "reward": 1.0},
    )
    write(tmp_path / "grpo/transcripts.jsonl", old, other, new)
    screen = StringIO()
    show_result(tmp_path, (0.62, 0.93), Console(file=screen, width=80))
    lines = [line.replace("│", " ").split() for line in screen.getvalue().splitlines()]
    assert ["greedy", "accuracy", "50.0%", "95.0%"] in lines
    assert ["sampled", "accuracy", "62.0%", "93.0%"] in lines
    assert ["47+5=", "42", "wrong", "52", "right"] in lines and "1+1=" not in screen.getvalue()
    assert "gain: +45.0 points greedy, +31.0 points sampled" in screen.getvalue()
    assert "0.8 ┤" in screen.getvalue() and "0.7 ┤" in screen.getvalue()
    smoothed, held_out = re.findall(r'<polyline points="([^"]*)"', (tmp_path / "curve.svg").read_text())
    assert len(smoothed.split()) == 3 and len(held_out.split()) == 2
    assert smoothed.split()[-1] == "620.0,104.0", "0.8, on an axis from 0.5 to 1"


def write(file: Path, *rows: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
