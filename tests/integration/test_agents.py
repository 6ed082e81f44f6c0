"""Several turns through Ray, vLLM and DeepSpeed: tools, an agent behind OpenAI's client, and a game are learnt.

What is trained is compared with the engine's own record, token by token.
"""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.support.recording_engine import RECORD
from trueline.cli import main
from trueline.data.types import Sample, Trajectory, to_samples
from trueline.rollout import summary
from trueline.rollout.engines import ROLLOUT_ENGINES

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
QUIET = ["monitoring.tensorboard=false", "monitoring.doctor=false", "checkpoint.save=false", "rollout.engine=recording"]


def commands(example: str, folder: Path) -> list[list[str]]:
    """The commands of an example's run.sh, with its variables filled in."""
    text = (ROOT / "examples" / example / "run.sh").read_text().replace("\\\n", " ")
    text = text.replace("$here", str(ROOT / "examples" / example)).replace("$folder", str(folder))
    lines = [shlex.split(line) for line in text.splitlines() if re.match(r"python|trueline", line)]
    return [[found for word in line for found in unfolded(word)] for line in lines]


def unfolded(word: str) -> list[str]:
    """Fill in the name of the only checkpoint, and leave out what run.sh hands on."""
    if word.startswith("${@"):
        return []
    if "step_*" not in word:
        return [word]
    before, _, behind = word.partition("step_*")
    return [f"{found}{behind}" for found in map(str, Path(before).glob("step_*"))]


def prepare(example: str, folder: Path) -> None:
    """Make model and data, and train the former a little, as run.sh does."""
    prepared, taught = [line for line in commands(example, folder) if line[0] == "python" or line[1] == "sft"]
    subprocess.run([sys.executable, *prepared[1:]], check=True, capture_output=True)
    assert main([*taught[1:], "monitoring.tensorboard=false"]) == 0


class Watched:
    """A run with an engine that records, and all that it trained on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.record = folder, folder / "engine.jsonl"
        self.trained: list[tuple[Trajectory, list[Sample]]] = []
        row = replace(ROLLOUT_ENGINES["vllm"], path="tests.support.recording_engine:RecordingEngine")
        monkeypatch.setitem(ROLLOUT_ENGINES, "recording", row)
        monkeypatch.setenv(RECORD, str(self.record))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setattr(summary, "to_samples", self.remember)

    def remember(self, trajectory: Trajectory) -> list[Sample]:
        samples = to_samples(trajectory)
        self.trained.append((trajectory, samples))
        return samples

    def run(self, line: list[str], *words: str) -> list[dict[str, Any]]:
        assert main([*line[1:], *QUIET, *words]) == 0
        name = words[-1].removeprefix("name=") if words and words[-1].startswith("name=") else line[1]
        file = self.folder / ("agent" if "--agent" in line else name) / "metrics.jsonl"
        return [row for row in map(json.loads, file.read_text().splitlines()) if "loss" in row]

    def check(self, rows: list[dict[str, Any]]) -> None:
        """Every sampled token is one that the engine recorded behind the very tokens before it; no other is learnt."""
        said = {
            (tuple(row["given"]), tuple(row["said"])) for row in map(json.loads, self.record.read_text().splitlines())
        }
        turns = 0
        for _, samples in self.trained:
            for sample in samples:
                for begin, end in stretches(sample.mask.tolist()):
                    turns += 1
                    assert (tuple(sample.tokens[:begin].tolist()), tuple(sample.tokens[begin:end].tolist())) in said
        assert turns > 1.5 * len(self.trained)  # several turns, as a rule
        assert max(row["mismatch/logprob_gap_max"] for row in rows) < 1e-4


def stretches(mask: list[bool]) -> list[tuple[int, int]]:
    edges = [at for at in range(len(mask) + 1) if (at < len(mask) and mask[at]) != (at > 0 and mask[at - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draw")
    prepare("tools", folder)
    return folder


@pytest.mark.parametrize("example", ["tools", pytest.param("agent", marks=pytest.mark.soak)])
def test_a_tool_is_learnt(example: str, drawing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tool says cannot be known: from below 0.3 to above 0.8, by the run's own tools and by an agent's."""
    watched = Watched(drawing, monkeypatch)
    watched.record = drawing / f"{example}.jsonl"
    monkeypatch.setenv(RECORD, str(watched.record))
    rows = watched.run(commands(example, drawing)[-1])
    assert rows[0]["reward/mean"] < 0.3
    assert fmean(row["reward/mean"] for row in rows[-5:]) > 0.8
    watched.check(rows)
    assert rows[-1]["episode/turns"] > 1.5 and rows[-1]["episode/sequences"] == 1.0


FORMAL = """
import json

def main(prompt, client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    messages = [{"role": "user", "content": prompt}]
    answer = client.chat.completions.create(model="policy", messages=messages, response_format=shape)
    return float(set(json.loads(answer.choices[0].message.content)) == {"a"})
"""


def test_replies_are_held_to_a_format_by_the_engines_of_a_run(drawing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reply is JSON of the schema; what the trainer makes of it without the schema differs, as it must."""
    (drawing / "formal.py").write_text(FORMAL)
    Watched(drawing, monkeypatch)
    changed = {f"{ROOT}/examples/agent/agent.py:main": f"{drawing}/formal.py:main", "agent": "formal"}
    line = [changed.get(word, word) for word in commands("agent", drawing)[-1]]
    assert main([*line[1:], *QUIET, "steps=1"]) == 0
    rows = map(json.loads, (drawing / "formal" / "metrics.jsonl").read_text().splitlines())
    (row,) = [row for row in rows if "loss" in row]
    assert (row["reward/mean"], row["agent/structured"]) == (1.0, 1.0)
    assert row["mismatch/logprob_gap_max"] > 1e-3


@pytest.mark.parametrize(
    ("seed", "steps", "least"),
    [(0, 6, 0.5), *(pytest.param(seed, 24, 0.85, marks=pytest.mark.soak) for seed in range(3))],
)
def test_a_game_of_three_turns_is_learnt(
    seed: int, steps: int, least: float, gaming: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PPO with a reward for every turn: the teacher is right in a quarter of them, and else guesses one of four."""
    watched, name = Watched(gaming, monkeypatch), f"{steps}-{seed}"
    watched.record = gaming / f"{name}.jsonl"
    monkeypatch.setenv(RECORD, str(watched.record))
    rows = watched.run(commands("environment", gaming)[-1], f"seed={seed}", f"steps={steps}", f"name={name}")
    assert rows[0]["reward/mean"] < 0.5
    assert fmean(row["reward/mean"] for row in rows[-3:]) > least
    watched.check(rows)
    for trajectory, samples in watched.trained:
        assert [len(stretches(sample.mask.tolist())) for sample in samples] == [3] or trajectory.truncated


@pytest.fixture(scope="module")
def gaming(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("game")
    prepare("environment", folder)
    return folder
