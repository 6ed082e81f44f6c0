"""Rewards that misbehave in every way, in whole runs: no failed answer is trained on, and too many stop the run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.tiny import make_tiny_model
from trueline.cli import main

# Every answer that is judged at all earns 1, so a single fake zero would show in the mean.
FAULTS = {
    "loops_in_c": "sum(range(10**15))",
    "segfaults": "ctypes.string_at(0)",
    "leaks": "len([bytearray(2**28) for _ in range(16)])",
    "raises": "1 / 0",
    "nan": "float('nan')",
    "text": "'good'",
    "sleeps": "time.sleep(1000)",
    "exits": "os._exit(3)",
}
FUNCTIONS = "import ctypes, os, time\n" + "".join(
    f"""
def {name}(reply: str, number: int) -> float:
    return {fault} if number % 5 == 0 else 1.0
"""
    for name, fault in FAULTS.items()
)
FUNCTIONS += """
def wrong_length(replies: list[str], number: list[int]) -> list[float]:
    return [1.0] * (len(replies) + any(one % 5 == 0 for one in number))
"""
LONG = ("loops_in_c", "leaks", "sleeps")
CULPRIT = {  # what the user reads when the run stops
    "loops_in_c": "more than 1 s",
    "segfaults": "died",
    "leaks": "MemoryError",
    "raises": "ZeroDivisionError: division by zero",
    "nan": "finite number",
    "text": "finite number",
    "sleeps": "more than 1 s",
    "exits": "died",
    "wrong_length": "wrong_length",
}
ENDLESS = ("loops_in_c", "sleeps")  # only these shall meet their deadline


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_tiny_model(folder / "model", tied=True)
    rows = [{"prompt": f"{number}:", "number": number} for number in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(FUNCTIONS)
    return folder


def train(home: Path, name: str, *words: str) -> int:
    named = ["--model", f"{home}/model", "--data", f"{home}/prompts.jsonl", "--name", name, f"folder={home}"]
    small = ["runtime=local", "prompts_per_step=8", "algorithm.group_size=2", "rollout.max_new_tokens=2", "steps=2"]
    quiet = ["checkpoint.every=0", "monitoring.tensorboard=false", "monitoring.doctor=false", "data.shuffle=false"]
    patience = f"reward.timeout_seconds={1 if any(fault in name for fault in ENDLESS) else 60}"
    return main(["dr_grpo", *named, *small, *quiet, patience, "reward.memory_gib=1", *words])


def rows_of(home: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / name / "metrics.jsonl").read_text().splitlines()][1:]


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=pytest.mark.slow) if one in LONG else one for one in CULPRIT]
)
def test_failed_answers_are_counted_and_never_trained_on(home: Path, fault: str) -> None:
    """Prompts 0, 5, 10, ... fail; their groups leave, and others take their place."""
    name = f"finishes-{fault}"
    words = [f"reward.function={home}/rewards.py:{fault}", "reward.max_failure_share=0.9", "reward.batch=4"]
    assert train(home, name, *words) == 0
    for row in rows_of(home, name):
        assert row["reward/failed"] > 0
        assert row["rollout/groups"] == 8  # trained on, all of their answers with the one reward that is no failure
        assert (row["reward/mean"], row["reward/std"]) == (1.0, 0.0)


@pytest.mark.parametrize("fault", CULPRIT)
def test_the_culprit_is_named_when_the_run_stops(home: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"reward.function={home}/rewards.py:{fault}", "reward.max_failure_share=0.01"]
    assert train(home, f"named-{fault}", *words) == 1
    said = capsys.readouterr().out
    assert f"rewards.py:{fault}" in said
    assert CULPRIT[fault] in said


def test_one_process_loads_a_function_for_the_plan_and_the_run(home: Path) -> None:
    """Each process that loads the file notes its number; the first reward of the run comes from that of the plan."""
    noted, file = home / "loaded", home / "noting.py"
    file.write_text(
        f"import os\nNOTED = open({str(noted)!r}, 'a')\nprint(os.getpid(), file=NOTED, flush=True)\nprint('loaded')\n"
        "def noting(reply, number):\n    return os.getpid()\n"
    )
    words = [f"reward.function={file}:noting", "reward.processes=1", "steps=1"]
    assert train(home, "noting", *words) == 0
    (loaded,) = noted.read_text().split()
    assert rows_of(home, "noting")[0]["reward/mean"] == float(loaded)
    assert "loaded" in (home / "noting" / "logs" / "reward.log").read_text()  # what it printed under the plan


@pytest.mark.parametrize("fault", ["raises", "segfaults"])
def test_too_many_failures_stop_the_run_and_can_be_seen_again(
    home: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"stops-{fault}"
    assert train(home, name, f"reward.function={home}/rewards.py:{fault}", "reward.max_failure_share=0.01") == 1
    said = capsys.readouterr().out
    for part in ("reward.max_failure_share=0.01", "reward_error", CULPRIT[fault]):
        assert part in said
    file = home / name / "failures" / "1.json"
    assert f"python -m trueline.rewards.replay {file}" in said
    again = subprocess.run(
        [sys.executable, "-m", "trueline.rewards.replay", str(file)], capture_output=True, text=True, check=False
    )
    assert again.returncode != 0
    assert "ZeroDivisionError" in again.stderr if fault == "raises" else again.returncode < 0


def test_what_was_trained_before_the_run_stops_is_saved(home: Path) -> None:
    """The first step's prompts are fine; all later ones fail."""
    (home / "later.py").write_text("def later(reply: str, number: int) -> float:\n    return 1 / (number < 8)\n")
    assert train(home, "later", f"reward.function={home}/later.py:later") == 1
    assert [path.name for path in (home / "later" / "checkpoints").iterdir()] == ["step_000001"]


class Judge(BaseHTTPRequestHandler):
    """Answers each request with the next of `statuses`, the last one for ever; 200 comes with a grade."""

    statuses: list[int] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        body = json.dumps({"choices": [{"message": {"content": "Grade: 10"}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[list[str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    yield [
        "reward.function=judge",
        f"reward.judge.url={url}",
        "reward.judge.model=any",
        "reward.remote.backoff_seconds=0.01",
        "reward.remote.attempts=3",
    ]
    server.shutdown()
    server.server_close()


def test_a_judge_that_is_busy_for_a_while_costs_no_answer(home: Path, judge: list[str]) -> None:
    Judge.statuses = [500, 429, 503, 429, 200]
    assert train(home, "patient", *judge, "reward.remote.concurrency=1", "reward.remote.attempts=5") == 0
    for row in rows_of(home, "patient"):
        assert (row["reward/failed"], row["reward/mean"]) == (0, 1.0)


@pytest.mark.parametrize("status", [500, 429])
def test_a_judge_that_never_answers_stops_the_run_by_name(
    home: Path, judge: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Judge.statuses = [status]
    assert train(home, f"judge-{status}", *judge) == 1
    said = capsys.readouterr().out
    for part in ("infra_error", f"status {status}", "127.0.0.1", "3 tries", "reward.max_failure_share=0.05"):
        assert part in said
    assert not (home / f"judge-{status}" / "checkpoints").exists()  # nothing was trained
