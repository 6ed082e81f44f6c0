"""What a run has trained is saved before a failure ends it, unless it stopped inside a step."""

import asyncio
import json
import os
import pty
import re
import signal
import sys
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.support.letters import rows_of, run_letters
from trueline.cli import main
from trueline.config.base import ConfigError
from trueline.config.run import CheckpointConfig
from trueline.monitoring.progress import Progress
from trueline.monitoring.timing import Timer
from trueline.plan.memory import GIB, Choice, EngineRoom, Forecast, MemoryPool
from trueline.rollout.evaluation import Evaluator
from trueline.rollout.hf_engine import HFEngine
from trueline.runs.rescue import MemoryWatch, SaveOnFailure
from trueline.runs.state import RLState
from trueline.runtime.actors import ActorFailure
from trueline.training import saving
from trueline.training.checkpoints import Checkpoints
from trueline.training.engines.torch_engine import TorchEngine
from trueline.training.worker import Worker

ROOT = Path(__file__).resolve().parents[3]


def newest(folder: Path) -> str | None:
    found = Checkpoints(folder / "run", CheckpointConfig()).newest()
    return found.name if found else None


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int) -> None:
    """The call of that number, counted from 1, fails as a process that died does."""
    calls: list[int] = []
    whole = getattr(owner, method)

    @wraps(whole)  # the name is what travels to an actor
    def counted(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise ActorFailure("its process died")
        return whole(self, *args)

    monkeypatch.setattr(owner, method, counted)


def test_steps_before_an_engine_died_are_saved_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_at(monkeypatch, HFEngine, "generate", 2 * 64 + 10)  # in the third step
    assert run_letters(tmp_path, "grpo", "steps=4") == 1
    assert newest(tmp_path) == "step_000002"
    assert "its process died" in capsys.readouterr().out
    assert main(["grpo", "--resume", "--name", "run", f"folder={tmp_path}"]) == 0
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("owner", "method", "call", "saved"),
    [(HFEngine, "generate", 2 * 64 + 1, "step_000002"), (Worker, "update", 4, None)],  # with two updates per step
)
def test_half_a_step_is_not_saved_as_one(
    owner: type,
    method: str,
    call: int,
    saved: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail_at(monkeypatch, owner, method, call)
    assert run_letters(tmp_path, "grpo", "steps=3", "minibatches=2") == 1
    assert newest(tmp_path) == saved
    assert ("ended inside step 2" in capsys.readouterr().out) == (saved is None)


def patch_looks(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """Looks at a save under way either wait for its end or never see it."""
    whole = Worker.save_result

    @wraps(whole)
    def result(self: Worker, wait: bool) -> Any:
        return whole(self, True) if wait or waits else None

    monkeypatch.setattr(Worker, "save_result", result)


def test_a_checkpoint_under_way_is_waited_for_where_a_step_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_looks(monkeypatch, waits=False)
    fail_at(monkeypatch, Worker, "update", 4)
    assert run_letters(tmp_path, "grpo", "steps=3", "minibatches=2", "checkpoint.every=1") == 1
    assert newest(tmp_path) == "step_000001"


@pytest.mark.parametrize("verb", ["grpo", "sft"])
def test_a_checkpoint_gets_its_name_before_the_next_step_ends(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patch_looks(monkeypatch, waits=True)
    prepared: list[int] = []
    monkeypatch.setattr(
        Worker, "prepare_saving", wraps(Worker.prepare_saving)(lambda self, sharers: prepared.append(sharers))
    )
    run_letters(tmp_path, "grpo", "--dry-run")  # makes model and rows
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1:", "completion": "abc"}\n' * 8)
    words = ["steps=4", "checkpoint.every=2", "checkpoint.keep=1"]
    if verb == "sft":
        words += ["samples_per_step=2", f"data.path={tmp_path}/rows.jsonl"]
        given = ["--model", f"{tmp_path}/model", "runtime=local", f"folder={tmp_path}", "name=run"]
        assert main(["sft", *given, *words]) == 0
    else:
        assert run_letters(tmp_path, "grpo", *words) == 0
    said = re.findall(r"run (\d)/4|saved +step_00000(\d)", capsys.readouterr().out)
    order = [f"step {step}" if step else f"saved {saved}" for step, saved in said]
    assert order.index("step 2") < order.index("saved 2") <= order.index("step 3") + (verb == "sft")
    assert order[-1] == "saved 4"
    assert newest(tmp_path) == "step_000004"
    rows = {row["step"]: row for row in rows_of(tmp_path)}
    assert prepared == [1]
    assert rows[3 if verb == "grpo" else 4]["time/save"] > 0


def test_a_failure_before_the_first_step_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, HFEngine, "generate", 5)
    assert run_letters(tmp_path, "grpo", "steps=2") == 1
    assert newest(tmp_path) is None


def test_a_policy_that_does_not_answer_leaves_the_error_that_came_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_at(monkeypatch, HFEngine, "generate", 64 + 1)
    fail_at(monkeypatch, Worker, "ready", 1)
    assert run_letters(tmp_path, "grpo", "steps=2") == 1
    said = capsys.readouterr().out
    assert "could not be saved" in said
    assert "error: its process died" in said
    assert newest(tmp_path) is None


def test_an_offline_run_saves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are not finite change nothing, so what came before them is what is saved."""
    run_letters(tmp_path, "grpo", "--dry-run")  # makes model and rows
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1:", "completion": "abc"}\n' * 8)
    monkeypatch.setattr("trueline.training.engines.torch_engine.TorchEngine.backward", poisoned_after(3))
    words = ["--model", f"{tmp_path}/model", "--data", f"{tmp_path}/rows.jsonl", f"folder={tmp_path}", "name=run"]
    small = ["samples_per_step=2", "runtime=local", "training.max_bad_steps=1", "checkpoint.every=0", "epochs=3"]
    assert main(["sft", *words, *small]) == 1
    assert newest(tmp_path) == "step_000004"  # three good ones, and one that was skipped
    assert rows_of(tmp_path)[-1]["skipped_steps"] == 1


def poisoned_after(good: int) -> Any:
    from trueline.training.engines.torch_engine import TorchEngine

    calls: list[int] = []
    whole = TorchEngine.backward

    def backward(self: TorchEngine, loss: Any, *, last: bool) -> None:
        calls.append(1)
        whole(self, loss if len(calls) <= good else loss * float("nan"), last=last)

    return backward


@pytest.mark.slow
def test_a_dropped_connection_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """The terminal goes away: SIGHUP, and nothing can be printed any more."""
    code = (
        "import sys; from pathlib import Path; from tests.support.letters import run_letters; "
        f"sys.exit(run_letters(Path({str(tmp_path)!r}), 'grpo', 'steps=100000'))"
    )
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", code])
    seen = ""
    while not re.search(r"step [1-9][0-9]*/100000", seen):
        seen += os.read(terminal, 4096).decode(errors="replace")
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert not os.WIFSIGNALED(status), signal.Signals(os.WTERMSIG(status)).name
    steps = [row["step"] for row in rows_of(tmp_path)]
    assert newest(tmp_path) == f"step_{steps[-1]:06d}"
    assert steps[-1] < 100000


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_signal_ends_sampling_at_once_and_its_prompts_are_trained_on_once(
    staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers of the third step never come; the run does not wait for them, and another one samples them anew."""
    words = ["grpo", "steps=4", f"rollout.max_staleness={staleness}", "timeout_seconds=60"]
    generate, calls = HFEngine.generate, []

    @wraps(generate)
    async def hanging(self: HFEngine, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 * 64 + 10 + staleness * 64:  # while the third step waits
            os.kill(os.getpid(), signal.SIGTERM)
        if len(calls) >= 2 * 64 + 10:
            await asyncio.Event().wait()
        return await generate(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "generate", hanging)
        assert run_letters(tmp_path, *words) == 130
    assert newest(tmp_path) == "step_000002"
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2]
    said = capsys.readouterr().out
    assert re.search(r"ledger +\d+ prompts sampled: 16 trained, \d+ in flight", said)
    assert "stopped: step 2 of 4" in said
    assert main(["grpo", "--resume", "--name", "run", f"folder={tmp_path}"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert sorted(number for row in rows for number in row["trained"]) == list(range(32))


def test_a_signal_during_an_update_saves_the_step_before_its_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sent it may not wait for the evaluation; the checkpoint is on the disk when that begins."""
    update, evaluate = Worker.update, Evaluator.run
    seen: list[str | None] = []

    @wraps(update)
    def signalled(self: Worker, *args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return update(self, *args)

    def looking(self: Evaluator, *args: Any) -> Any:
        seen.append(newest(tmp_path))
        return evaluate(self, *args)

    monkeypatch.setattr(Worker, "update", signalled)
    monkeypatch.setattr(Evaluator, "run", looking)
    words = [f"evaluation.data={tmp_path}/prompts.jsonl", "evaluation.every=1", "evaluation.limit=4"]
    assert run_letters(tmp_path, "grpo", "steps=3", *words) == 130
    assert seen == [None, "step_000001"]
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1]


def test_a_checkpoint_that_cannot_be_described_costs_that_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    describe, calls = saving.describe_model, []

    def failing(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ConfigError("its tokenizer cannot be loaded")
        describe(*args)

    monkeypatch.setattr(saving, "describe_model", failing)
    assert run_letters(tmp_path, "grpo", "steps=2", "checkpoint.every=1") == 0
    said = capsys.readouterr().out
    assert "warning: step_000001 could not be saved (rank 0: its tokenizer cannot be loaded); the run continues" in said
    assert newest(tmp_path) == "step_000002"


def out_of_memory(monkeypatch: pytest.MonkeyPatch, *passes: int) -> None:
    """Memory runs out in the backward passes of these numbers, counted from 1."""
    whole, calls = TorchEngine.backward, []

    def backward(self: TorchEngine, loss: Any, *, last: bool) -> None:
        calls.append(1)
        if len(calls) in passes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        whole(self, loss, last=last)

    monkeypatch.setattr(TorchEngine, "backward", backward)


def test_a_step_that_ran_out_of_memory_is_made_again_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out_of_memory(monkeypatch, 2)
    assert run_letters(tmp_path, "grpo", "steps=3") == 0
    rows = rows_of(tmp_path)
    assert [row.get("memory/halved") for row in rows] == [None, None, 1.0, 1.0]
    said = capsys.readouterr().out
    tokens = re.findall(r"passes now have up to (\d+) tokens; set training\.micro_batch_tokens=", said)
    assert tokens == ["2048"]
    assert "Peak memory" not in said  # nothing was measured: there is no GPU


@pytest.mark.parametrize("verb", ["grpo", "sft"])
def test_memory_that_runs_out_is_answered(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_letters(tmp_path, "grpo", "--dry-run")  # makes model and rows
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1:", "completion": "abc"}\n' * 8)
    out_of_memory(monkeypatch, 2, 3)
    words = ["--model", f"{tmp_path}/model", "--data", f"{tmp_path}/rows.jsonl", f"folder={tmp_path}", "name=run"]
    sft = partial(main, ["sft", *words, "samples_per_step=2", "runtime=local", "checkpoint.every=0", "epochs=3"])
    assert (run_letters(tmp_path, "grpo", "steps=3") if verb == "grpo" else sft()) == 1
    said = capsys.readouterr().out
    assert re.search(
        r"error: out of memory in step 2 \(train\): forecast [\d.]+ GiB \(training\) of [\d.]+ GiB, peak before "
        r"0\.0 GiB; lower training\.micro_batch_tokens or model\.head_chunk_tokens, or set",
        said,
    )
    assert "out of memory in passes of up to 2048 tokens" in said


def test_what_was_in_use_is_told_at_the_end_and_an_engine_is_answered_with_its_share(tmp_path: Path) -> None:
    plan: Any = Forecast(
        MemoryPool(10 * GIB, "cpu", [], 1, EngineRoom(GIB, GIB, GIB)), Choice({}, False), Choice({}, False), []
    )
    timer = Timer()
    watch = MemoryWatch(plan, timer)
    for used in (2.0, 5.0, 3.0):
        watch.see({"memory/device_gib": used})
    watch.see({"loss": 1.0})
    said: list[str] = []
    progress = Progress("run", 1, Console(quiet=True))
    progress.note = said.append  # type: ignore[method-assign]
    rescue = SaveOnFailure(RLState(), [], lambda: None, Checkpoints(tmp_path, CheckpointConfig()), watch, progress)
    with rescue:
        pass
    assert said == ["Peak memory 5.0 GiB (forecast 1.0 GiB (training))"]
    with pytest.raises(ActorFailure), rescue, timer.phase("sync"):
        raise ActorFailure("engine-0.wake: RuntimeError: CUDA Error: out of memory")
    assert re.search(r"in step 1 \(sync\).* lower rollout\.gpu_memory_utilization or", said[-1])
    for other in ("CUDA error: an illegal memory access", "reward.py: MemoryError: out of memory"):
        with pytest.raises(ActorFailure), rescue:
            raise ActorFailure(other)
    assert len(said) == 2  # the plan of the GPU's memory is not to blame for these
