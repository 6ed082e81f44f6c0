"""Rollout workers in real Ray processes: the numbers of a run in one process, through kills of workers and engines."""

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.support.letters import letters_command, run_letters
from tests.support.reward_models import make_reward_model
from tests.support.warm import WarmProcesses, warm_processes
from trueline.cli import main
from trueline.rl.trainer import RLTrainer
from trueline.rollout.groups import Numbered, SamplerSpec
from trueline.runs.interrupts import Interrupts
from trueline.runs.rollout_workers import RolloutWorkers
from trueline.runtime.actors import RayActor

SMALL = ["rollout.engine=hf", "training.engine=torch", "algorithm.kl.coefficient=0", "data.shuffle=false"]
APART = ["runtime=ray", "rollout.workers=2", *SMALL]
WHOLE = ["monitoring.transcripts_per_step=64", "monitoring.tokens=true"]
MACHINE = ("time/", "speed/", "memory/", "engine/", "sync/", "sampler_z")  # the last divides by a deviation near 0


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmProcesses]:
    with warm_processes() as found:
        yield found


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def rows_in(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without those of the machine, step 0 included."""
    rows = read_lines(run / "metrics.jsonl")
    return [{name: row[name] for name in row if not any(part in name for part in MACHINE)} for row in rows]


def trained(run: Path) -> list[list[int]]:
    """Return the numbers of the prompts of each step."""
    return [row["trained"] for row in read_lines(run / "ledger.jsonl")]


def check_equal(apart: Path, alone: Path, steps: int) -> None:
    """Compare every number of every step, texts, tokens and rewards of completions, and the ledger."""
    ours, theirs = rows_in(apart), rows_in(alone)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list(range(steps + 1))
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=1e-5, rel=1e-5, nan_ok=True), one["step"]
    ours, theirs = (read_lines(run / "transcripts.jsonl") for run in (apart, alone))
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        parts = [[(part["text"], part["sampled"]) for part in row.pop("tokens", [])] for row in (one, other)]
        assert parts[0] == parts[1]
        numbers = [{name: row.pop(name) for name in list(row) if isinstance(row[name], float)} for row in (one, other)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-5) and one == other
    assert trained(apart) == trained(alone)


def both(folder: Path, verb: str, steps: int, *words: str) -> tuple[Path, Path]:
    """Make a run with two workers, and one in this very process."""
    for name, own in (("apart", APART), ("alone", SMALL)):
        assert run_letters(folder, verb, *own, *WHOLE, f"steps={steps}", f"name={name}", *words) == 0
    return folder / "apart", folder / "alone"


@pytest.mark.slow
def test_a_run_with_workers_is_the_run_of_one_process(
    warm: WarmProcesses, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = [f"evaluation.data={tmp_path}/prompts.jsonl", "evaluation.every=1", "evaluation.limit=3"]
    apart, alone = both(tmp_path, "grpo", 3, *held_out)
    check_equal(apart, alone, 3)
    assert all("evaluation/reward" in row for row in rows_in(apart))
    assert all((apart / "logs" / f"rollouts-{number}" / "reward.log").exists() for number in range(2))
    plans = capsys.readouterr().out.split("done: ")
    assert "workers    2 for rollouts" in plans[0] and "\nworkers " not in plans[1]


OWN_RANKS = ["critic.engine=torch", "reward_model.engine=torch", "critic.learning_rate=1e-3"]
VARIANTS = {
    "ppo": ["--reward", "{}/judge", *OWN_RANKS, "rollout.max_prompt_tokens=32"],
    "remax": [],
    "dapo": ["--reward", "{}/reward.py:some_uniform", "algorithm.dynamic_sampling.max_batches=4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", VARIANTS)
def test_other_algorithms_with_workers_are_those_of_one_process(warm: WarmProcesses, tmp_path: Path, verb: str) -> None:
    """A critic and a reward model, a greedy baseline, and dynamic sampling."""
    make_reward_model(tmp_path / "judge", "reward")
    words = [word.format(tmp_path) for word in VARIANTS[verb]]
    apart, alone = both(tmp_path, verb, 3, *words)
    check_equal(apart, alone, 3)
    if verb == "dapo":
        assert sum(row.get("rollout/uniform_share", 0) for row in rows_in(apart)) > 0
    if verb == "ppo":
        assert len({row["reward/mean"] for row in rows_in(apart)[1:]}) == 3


@pytest.mark.slow
def test_sampling_ahead_through_workers_trains_each_prompt_once(warm: WarmProcesses, tmp_path: Path) -> None:
    assert run_letters(tmp_path, "grpo", *APART, "rollout.max_staleness=1", "steps=6") == 0
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")[1:]
    assert len(rows) == 6 and max(row["rollout/staleness_max"] for row in rows) == 1
    assert sorted(number for step in trained(tmp_path / "run") for number in step) == list(range(48))
    assert sum(row["engine/0/requests"] for row in rows) >= 6 * 64  # of both workers


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "file"), [("generate", "samples.jsonl"), ("eval", "transcripts.jsonl")])
def test_jobs_that_sample_do_so_through_a_worker(warm: WarmProcesses, tmp_path: Path, verb: str, file: str) -> None:
    found = []
    for name, own in (("apart", ["runtime=ray", "rollout.workers=1"]), ("alone", ["runtime=local"])):
        words = {"generate": ["samples=3", "limit=5"], "eval": [*EVAL, "evaluation.limit=5"]}[verb]
        assert run_sampling(tmp_path, verb, *words, "rollout.engine=hf", f"name={name}", *own) == 0
        found.append(sorted((tmp_path / name / file).read_text().splitlines()))
    assert found[0] == found[1] and len(found[0]) == 5


EVAL = ["evaluation.samples=3", "evaluation.temperature=1"]


def run_sampling(folder: Path, verb: str, *words: str) -> int:
    """Run a job that trains nothing, without the keys of training."""
    command = letters_command(folder, verb, *words)
    return main(
        [word for word in command if not word.startswith(("prompts_per_step", "training", "checkpoint", "mon"))]
    )


class Killer:
    """Kills workers at random moments: in every eight steps four, at most two in one (three would end the run)."""

    def __init__(self) -> None:
        self.random, self.lock = random.Random(0), threading.Lock()
        self.killed, self.threads = set[int](), list[threading.Thread]()

    def begin_step(self, step: int, workers: RolloutWorkers) -> None:
        for thread in self.threads:
            thread.join()
        count = {0: 2, 3: 1, 6: 1}.get(step % 8, 0)
        self.threads = [threading.Thread(target=self.kill_one, args=[workers]) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def kill_one(self, workers: RolloutWorkers) -> None:
        """Kill one that has started; where there is none, the run waits for one as well."""
        time.sleep(self.random.random() * 0.3)
        while True:
            ready = [actor for actor, ready in zip(workers.actors, workers.ready, strict=True) if ready.is_set()]
            located = {ray.get(actor.location_ref).pid for actor in ready if isinstance(actor, RayActor)}
            with self.lock:
                if living := sorted(located - self.killed):
                    os.kill(pid := self.random.choice(living), signal.SIGKILL)
                    self.killed.add(pid)
                    return
            time.sleep(0.01)


@pytest.mark.slow
def test_kills_of_workers_cost_no_prompt(
    warm: WarmProcesses, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    killer, step = Killer(), RLTrainer.step

    def harmed(self: RLTrainer, interrupts: Interrupts) -> None:
        killer.begin_step(self.state.step, self.workers)
        step(self, interrupts)

    monkeypatch.setattr(RLTrainer, "step", harmed)
    assert run_letters(tmp_path, "grpo", *APART, "rollout.workers=3", "prompts_per_step=4", "steps=40") == 0
    assert len(killer.killed) == 20
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert said.count("the worker is restarted, and its episodes begin anew") >= 19  # the last may be late
    assert trained(tmp_path / "run") == [list(range(4 * step, 4 * step + 4)) for step in range(40)]
    assert [row["step"] for row in rows_in(tmp_path / "run")] == list(range(41))
    assert all(row["rollout/groups"] == 4 for row in rows_in(tmp_path / "run")[1:])
    assert "160 prompts sampled, all trained" in said


def kill_engine_once(warm: WarmProcesses, purpose: str, number: int) -> Callable[..., Any]:
    """Return `RolloutWorkers.sample` that kills the engine while workers sample the group of this number."""
    sample, left = RolloutWorkers.sample, [number]

    async def killing(self: RolloutWorkers, spec: SamplerSpec, numbered: Numbered, place: int) -> list[Any]:
        if spec.purpose == purpose and numbered[0] == left[0]:
            left.clear()
            left.append(-1)
            (pid,) = warm.pids("engine")
            os.kill(pid, signal.SIGKILL)
        return await sample(self, spec, numbered, place)

    return killing


@pytest.mark.slow
@pytest.mark.parametrize(("purpose", "number"), [("train", 9), ("evaluate", 1)])
def test_an_engine_killed_while_workers_sample_is_replaced(
    warm: WarmProcesses, tmp_path: Path, purpose: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RolloutWorkers, "sample", kill_engine_once(warm, purpose, number))
    held_out = [f"evaluation.data={tmp_path}/prompts.jsonl", "evaluation.every=1", "evaluation.limit=3"]
    assert run_letters(tmp_path, "grpo", *APART, "steps=3", *held_out) == 0
    assert trained(tmp_path / "run") == [list(range(8 * step, 8 * step + 8)) for step in range(3)]
    assert all("evaluation/reward" in row for row in rows_in(tmp_path / "run"))
    assert "the engine is restarted" in (tmp_path / "run" / "logs" / "run.log").read_text()


DEADLY = """
import os
import signal


def deadly(reply: str, prompt: str) -> float:
    with open(f"/proc/{os.getppid()}/cmdline") as file:
        inside = file.read().startswith("ray::")
    if inside and int(prompt.rstrip(":")) >= 16:
        os.kill(os.getppid(), signal.SIGKILL)
    return len(set(reply)) / 8
"""


@pytest.mark.slow
def test_a_reward_that_kills_every_worker_ends_the_run_with_what_is_trained(
    warm: WarmProcesses, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deadly.py").write_text(DEADLY)
    words = [*APART, "--reward", f"{tmp_path}/deadly.py:deadly", "steps=9"]
    assert run_letters(tmp_path, "grpo", *words) == 1
    said = capsys.readouterr()
    assert re.sub(r"\s+", " ", said.out + said.err).count("rollout workers keep dying (3 times)") == 1
    assert "never retrieved" not in said.out + said.err
    assert (tmp_path / "run" / "checkpoints" / "step_000002" / "model").is_dir()
    assert trained(tmp_path / "run") == [list(range(8)), list(range(8, 16))]


def test_what_workers_cannot_do_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_letters(tmp_path, "grpo", "rollout.workers=2") == 2
    assert "rollout.workers=2: runtime=local keeps all in one process" in capsys.readouterr().err
    make_reward_model(tmp_path / "judge", "reward")
    words = ["runtime=ray", "rollout.workers=2", "reward_model.ranks=2", "rollout.max_prompt_tokens=32"]
    assert run_letters(tmp_path, "grpo", "--reward", f"{tmp_path}/judge", *words) == 2
    assert "rollout.workers=2: reward_model.ranks=2 take the calls of one process" in capsys.readouterr().err


AGENT = """
import os
from pathlib import Path


def main(prompt, client):
    here = Path(__file__).with_name(f"played-{os.getppid()}-{os.getpid()}")
    here.touch()
    messages = [{"role": "user", "content": prompt}]
    said = [client.chat.completions.create(model="policy", messages=messages).choices[0].message.content]
    messages += [{"role": "assistant", "content": said[0]}, {"role": "user", "content": "again"}]
    said += [client.chat.completions.create(model="policy", messages=messages).choices[0].message.content]
    return sum(len(set(text)) for text in said) / 16
"""


@pytest.mark.slow
def test_agents_play_in_children_of_the_workers_and_reach_their_endpoint(warm: WarmProcesses, tmp_path: Path) -> None:
    words = ["prompts_per_step=4", "steps=2", "environment.processes=4", "environment.max_turn_tokens=4"]
    words += ["environment.episodes_per_process=4", "rollout.max_new_tokens=16"]
    for name, own in (("apart", APART), ("alone", SMALL)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "agent.py").write_text(AGENT)
        agent = ["--agent", f"{tmp_path}/{name}/agent.py:main", f"folder={tmp_path}/runs", f"name={name}"]
        command = letters_command(tmp_path, "grpo", *own, *WHOLE, *words, *agent)
        at = command.index("--reward")
        assert main(command[:at] + command[at + 2 :]) == 0
    apart, alone = tmp_path / "runs" / "apart", tmp_path / "runs" / "alone"
    check_equal(apart, alone, 2)
    assert all(row["episode/turns"] == 2 for row in rows_in(apart)[1:])
    parents = [int(file.name.split("-")[1]) for file in (tmp_path / "apart").glob("played-*")]
    own = [pid for pid in parents if pid != os.getpid()]  # besides the trial
    assert len(own) == 4 and len(set(own)) == 2
    assert set(own) <= set(warm_pids(warm))


def warm_pids(warm: WarmProcesses) -> list[int]:
    return [
        ray.get(location).pid for kind, some in warm.idle.items() if "RolloutWorker" in kind for _, location in some
    ]
