"""Recorded steps, computed again: from checkpoints or the base model, in one process; and what is named if one differs.

Covers `trueline.replay.steps`, `trueline.replay.differences`, `trueline.replay.archive`, `trueline.replay.rewards`,
`trueline.replay.run`, `trueline.rl.keeping`.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.architectures import make_model
from tests.support.tiny import make_tiny_model
from trueline.cli import main
from trueline.monitoring.run_folder import RunFolder
from trueline.replay.steps import RecordedRun, score
from trueline.training.kept_samples import ABOUT, as_bytes, compress, read_arrays

REWARD = """
def letters(reply: str, wanted: str) -> float:
    return sum("a" <= character <= "z" for character in reply) / 8
"""
RUN = ["grpo", "--model", "model", "--data", "prompts.jsonl", "--reward", "reward.py:letters"]
SMALL = ["prompts_per_step=2", "algorithm.group_size=4", "rollout.max_new_tokens=10", "training.learning_rate=1e-3"]
QUIET = ["monitoring.doctor=false", "monitoring.tensorboard=false", "checkpoint.keep=2"]
WORDS = [*RUN, *SMALL, *QUIET]
Screen = pytest.CaptureFixture[str]
SECRET, PASSWORD = "hf_" + "a1B2" * 8, "correct-horse-battery"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of five steps: checkpoints after the second (without the first) and all that follow."""
    folder = tmp_path_factory.mktemp("home")
    make_tiny_model(folder / "model", tied=True)
    rows = [{"prompt": f"{number}:", "wanted": str(number)} for number in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = ["runtime=local", "minibatches=2", "steps=5", "checkpoint.every=2", "algorithm.kl.coefficient=0.01"]
        assert main([*WORDS, *words, "--name", "five"]) == 0
    return folder


@pytest.fixture
def home(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy, which a test may damage."""
    shutil.copytree(recorded, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    yield tmp_path / "home"


def replayed(capsys: Screen, *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    main(["replay", *words, "--json"])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def gap(step: dict[str, Any], name: str = "loss") -> float:
    return abs(float(step["logged"][name]) - float(step["here"][name]))


def change(run: Path, step: int, edit: Callable[[dict[str, Any], dict[str, np.ndarray]], object]) -> None:
    """Edit what is kept of a step."""
    file = run / "samples" / f"step_{step:06d}.npz"
    about, arrays = read_arrays(file)
    edit(about, arrays)
    file.write_bytes(compress({ABOUT: as_bytes(about)} | arrays))


# Steps as they were


def test_every_step_is_as_in_the_log_from_the_base_model_and_from_checkpoints(home: Path, capsys: Screen) -> None:
    found = replayed(capsys, "five", "--steps", "1-5")
    assert [step["step"] for step in found] == [1, 2, 3, 4, 5] and all(step["agrees"] for step in found)
    assert all(gap(step) < 1e-5 and gap(step, "grad_norm") < 1e-4 for step in found)
    assert all(step["tokens"]["largest"] < 1e-5 for step in found)
    assert not any("call" in json.loads(line) for line in (home / "runs/five/transcripts.jsonl").open())
    shutil.rmtree(home / "runs/five/checkpoints")
    (alone,) = replayed(capsys, "runs/five", "--step", "5")  # four steps of updates before it
    assert alone["agrees"] and gap(alone) < 1e-5 and alone["logged"]["loss"] != 0
    assert main(["replay", "five"]) == 0  # the last step
    assert "1 of 1 steps are as in the log" in (said := capsys.readouterr().out) and "     5  loss" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ["algorithm.old_logprobs=rollout", "algorithm.importance_sampling.mode=none"],
        ["training.stream=true"],
        ["model.lora.rank=4"],
    ],
)
def test_steps_of_other_kinds_of_runs(home: Path, keys: list[str], capsys: Screen) -> None:
    assert main([*WORDS, "runtime=local", "steps=3", "checkpoint.every=2", "--name", "other", *keys]) == 0
    found = replayed(capsys, "other", "--steps", "1-3")
    assert len(found) == 3 and all(step["agrees"] and gap(step) < 1e-5 for step in found)
    assert (found[0]["tokens"] is None) == (keys[0] == "algorithm.old_logprobs=rollout")


@pytest.mark.slow
def test_steps_of_a_critic(home: Path, capsys: Screen) -> None:
    words = ["ppo", *WORDS[1:], "runtime=local", "steps=3", "checkpoint.every=2", "critic.learning_rate=1e-3"]
    assert main([*words, "minibatches=2", "epochs=2", "--name", "ppo"]) == 0
    found = replayed(capsys, "ppo", "--steps", "1-3")
    assert all(step["agrees"] and gap(step, "critic/loss") < 1e-5 for step in found) and len(found) == 3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_steps_of_another_family_padded(home: Path, family: str, capsys: Screen) -> None:
    make_model(home / "model2", family)
    words = ["runtime=local", "steps=2", "training.packing=false", "--name", "family", "--model", "model2"]
    assert main([*WORDS, *words]) == 0
    found = replayed(capsys, "family", "--steps", "1-2")
    assert len(found) == 2 and all(step["agrees"] and gap(step) < 1e-5 for step in found)


# Planted differences


def test_another_temperature_is_named(home: Path, capsys: Screen) -> None:
    (step,) = replayed(capsys, "five", "--step", "4", "rollout.temperature=0.8")
    assert not step["agrees"] and step["causes"] == ["rollout.temperature is 1.0 in the run and 0.8 here"]
    assert main(["replay", "five", "--step", "4", "rollout.temperature=0.8"]) == 1
    said = capsys.readouterr().out
    assert "0 of 1 steps are as in the log" in said and "first difference: step 4: loss " in said
    assert "token log-probs differ first at sample 0, token " in said

    def colder(about: dict[str, Any], _: Any) -> None:
        about["updates"][1]["settings"]["temperature"] = 0.5

    change(home / "runs/five", 4, colder)
    (step,) = replayed(capsys, "five", "--step", "4")
    assert step["wrong"] == ["update 2 has temperature 0.5, and rollout.temperature is 1"]
    assert "loss" in step["different"]


@pytest.mark.slow
def test_log_probs_of_another_temperature_are_recognised(home: Path, capsys: Screen) -> None:
    """As if the run had scored its samples with one temperature and trained with another."""
    words = ["runtime=local", "steps=1", "minibatches=2", "--name", "hot", "rollout.temperature=0.7"]
    assert main([*WORDS, *words]) == 0

    def usual(about: dict[str, Any], _: Any) -> None:
        about["config"]["rollout"]["temperature"] = 1.0
        for update in about["updates"]:
            update["settings"]["temperature"] = 1.0

    change(home / "runs/hot", 1, usual)
    (step,) = replayed(capsys, "hot")
    assert step["causes"] == ["the log-probs of the run are those of temperature 0.7"]


def test_a_sample_that_is_left_out_is_named(home: Path, capsys: Screen) -> None:
    def leave_out(about: dict[str, Any], _: Any) -> None:
        for part in ("numbers", "weights"):
            about["updates"][0][part] = about["updates"][0][part][1:]

    left = read_arrays(home / "runs/five/samples/step_000003.npz")[0]["updates"][0]["numbers"][0]
    change(home / "runs/five", 3, leave_out)
    (step,) = replayed(capsys, "five", "--step", "3")
    assert step["wrong"][0] == f"sample {left} is left out of the policy update (1 of 8 samples are)"
    assert "loss" in step["different"] and step["tokens"]["sample"] == -1


def test_a_weight_that_no_aggregation_gives_is_named(home: Path, capsys: Screen) -> None:
    def heavier(about: dict[str, Any], _: Any) -> None:
        about["updates"][1]["weights"][2] *= 1.01

    change(home / "runs/five", 3, heavier)
    third = read_arrays(home / "runs/five/samples/step_000003.npz")[0]["updates"][1]["numbers"][2]
    (step,) = replayed(capsys, "five", "--step", "3", "training.learning_rate=1.01e-3")
    aggregation = step["wrong"][0].rpartition("=")[2]
    assert step["wrong"] == [f"update 2: the weight of sample {third} is not that of loss_aggregation={aggregation}"]
    assert step["causes"][0] == "training.learning_rate is 0.001 in the run and 0.00101 here"
    assert "learning_rate" in step["different"]


def test_samples_that_the_log_does_not_count_are_named(home: Path, capsys: Screen) -> None:
    log = home / "runs/five/metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows[3]["speed/tokens"] += 5
    rows[4]["loss"] += 1e-3
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    third, fourth = replayed(capsys, "five", "--steps", "3-4")
    assert third["wrong"][0].startswith("the log counts ") and third["different"] == []
    assert (fourth["wrong"], fourth["different"]) == ([], ["loss"])


def test_weights_of_another_step_are_named(home: Path, capsys: Screen) -> None:
    """The checkpoint after step 4 has the weights of the one after step 5."""
    saved = home / "runs/five/checkpoints"
    shutil.rmtree(saved / "step_000004")
    shutil.copytree(saved / "step_000005", saved / "step_000004")
    (step,) = replayed(capsys, "five", "--step", "5")
    assert not step["agrees"] and step["tokens"]["sample"] == 0
    assert step["causes"] == ["the log-probs fit weights computed from step 0: those saved as step 4 are others"]
    shutil.rmtree(saved)


@pytest.mark.slow
def test_log_probs_of_older_weights_are_named(home: Path, capsys: Screen) -> None:
    """As if the run had scored the samples of step 4 one step too early."""
    run = RecordedRun(RunFolder(home / "runs/five"), {})
    kept = run.open(4)
    with run.weights(2, 0, run.config(kept)) as models:
        found = dict(zip(kept.samples.numbers, score(models, kept.samples, 1.0), strict=True))
    stale = np.concatenate([found[number] for number in sorted(found)])
    change(home / "runs/five", 4, lambda _, arrays: arrays.update(old_logprobs=stale))
    (step,) = replayed(capsys, "five", "--step", "4")
    assert step["causes"] == ["the log-probs of the run are those of the weights after step 2, not 3"]


# What is missing


def test_a_step_that_cannot_be_replayed_says_what_is_missing(home: Path, capsys: Screen) -> None:
    run = home / "runs/five"
    shutil.rmtree(run / "checkpoints/step_000004")
    (run / "samples/step_000003.npz").unlink()
    assert main(["replay", "five", "--step", "4"]) == 2
    said = capsys.readouterr().err
    assert "step 4 cannot be replayed: it needs the weights after step 0" in said
    assert "step_000003.npz is not in" in said and "steps that can be replayed: 1-2" in said
    assert main(["replay", "five", "--steps", "4-2"]) == 2
    assert "--steps 4-2: write FIRST-LAST" in capsys.readouterr().err


def test_a_resumed_run_keeps_only_what_it_trained_on(home: Path, capsys: Screen) -> None:
    """Steps 5 and 9 are of a run that was killed behind the checkpoint after step 4."""
    run = home / "runs/five"
    shutil.rmtree(run / "checkpoints/step_000005")
    for name in ("step_000005.npz", "step_000009.npz", "step_000010.npz.unfinished"):
        (run / "samples" / name).write_bytes(b"torn")
    assert main(["grpo", "--resume", "five", "steps=6", "monitoring.keep_samples_mib=0.016"]) == 0
    kept = sorted(file.name for file in (run / "samples").iterdir())
    assert kept == ["step_000005.npz", "step_000006.npz"]  # for which there is room
    found = replayed(capsys, "five", "--steps", "5-6")
    assert len(found) == 2 and all(step["agrees"] and gap(step) < 1e-5 for step in found)


def test_an_offline_run_is_refused_by_name(home: Path, capsys: Screen) -> None:
    (home / "runs/offline").mkdir()
    (home / "runs/offline/config.yaml").write_text("# trueline sft\nname: offline\n")
    assert main(["replay", "offline"]) == 2
    assert "is a run of sft: only reinforcement learning is replayed" in capsys.readouterr().err


# Rewards


def test_rewards_are_asked_again(home: Path, capsys: Screen) -> None:
    assert main(["replay", "five", "--steps", "1-2", "--rewards"]) == 0
    assert "16 of 16 rewards of steps 1-2 are as in the run" in capsys.readouterr().out
    (home / "reward.py").write_text(
        "def letters(reply, wanted):\n    if reply[:1] > 'm':\n        raise KeyError(wanted)\n    return 7.0\n"
    )
    own = f"{home}/reward.py:letters"
    change(home / "runs/five", 3, lambda about, _: about["config"]["reward"].update(function=own))
    assert main(["replay", "five", "--steps", "3-3", "--rewards"]) == 1
    said = capsys.readouterr().out
    assert "in the run, 7 here" in said and "failed: " in said and "KeyError" in said
    assert "0 of 8 rewards of steps 3 are as in the run" in said


# Archives


def test_an_archive_has_no_secrets_and_replays_elsewhere(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Screen
) -> None:
    monkeypatch.setenv("SOME_API_KEY", PASSWORD)
    config = home / "runs/five/config.yaml"
    config.write_text(config.read_text().replace("options: {}", f"options:\n    api_key: plain\n    note: {SECRET}", 1))
    (home / "reward.py").write_text(
        f"{REWARD}\nURL = 'http://me:{PASSWORD}@host/x'  # {SECRET} in {Path.home()}/x, {PASSWORD}\n"
    )

    def plant(about: dict[str, Any], _: Any) -> None:
        about["calls"][0]["answer_key"] = "forty-two"
        about["calls"][0]["note"] = f"Bearer {SECRET} of {Path.home()}/data"
        about["config"]["reward"]["function"] = f"{home}/reward.py:letters"
        about["config"]["reward"]["options"] = {"password": "plain-password", "place": f"{Path.home()}/x"}

    change(home / "runs/five", 5, plant)
    assert main(["replay", "five", "--steps", "3-5", "--pack", "bug.zip"]) == 0
    assert "packs      steps 3-5 from the weights after step 0" in capsys.readouterr().err
    with zipfile.ZipFile("bug.zip") as archive:
        names = set(archive.namelist())
        assert {"config.yaml", "metrics.jsonl", "base/model.safetensors", "code/reward.py"} <= names
        assert "samples/step_000001.npz" in names
        archive.extractall(tmp_path / "looked")
    texts = [file.read_bytes() for file in (tmp_path / "looked").rglob("*.*") if file.suffix != ".npz"]
    for file in (tmp_path / "looked").rglob("*.npz"):
        texts.append(as_bytes(read_arrays(file)[0]).tobytes())
    assert any(b"forty-two" in text for text in texts)  # a column of the data is no key
    for hidden in (SECRET, PASSWORD, "plain-password", "//me", str(Path.home()), str(home), "plain\n"):
        assert not [text for text in texts if hidden.encode() in text], hidden
    assert Path("bug.zip").stat().st_size < 20 * 2**20
    (elsewhere := tmp_path / "elsewhere").mkdir()
    shutil.move("bug.zip", elsewhere / "bug.zip")
    shutil.rmtree(home)
    monkeypatch.chdir(elsewhere)
    found = replayed(capsys, "bug.zip", "--steps", "3-5")
    assert len(found) == 3 and all(step["agrees"] and gap(step) < 1e-5 for step in found)
    assert main(["replay", "bug.zip", "--step", "5", "--rewards"]) == 2
    assert (
        "reward.function=code/reward.py:letters is code or a server that the archive names" in capsys.readouterr().err
    )
    assert main(["replay", "bug.zip", "--step", "5", "--rewards", "--trust-code"]) == 0
    assert [file.name for file in elsewhere.iterdir()] == ["bug.zip"]


def test_an_archive_from_a_checkpoint_has_only_what_is_needed(home: Path, capsys: Screen) -> None:
    assert main(["replay", "five", "--step", "5", "--pack", "bug.zip"]) == 0
    with zipfile.ZipFile("bug.zip") as archive:
        names = archive.namelist()
    assert [name for name in names if name.startswith("samples/")] == ["samples/step_000005.npz"]
    assert "checkpoints/step_000004/training.safetensors" in names and "checkpoints/step_000004/manifest.json" in names
    assert not [name for name in names if "step_000004/model" in name or name.endswith("state.json")]
    (step,) = replayed(capsys, "bug.zip")
    assert (step["step"], step["agrees"]) == (5, True)
    assert main(["replay", "five", "--step", "5", "--pack", "less.zip", "--without-model"]) == 0
    with zipfile.ZipFile("less.zip") as archive:
        assert not [name for name in archive.namelist() if name.endswith(".safetensors")]
    assert main(["replay", "less.zip"]) == 2
    assert "the archive has no weights of model: name them with model.path=..." in capsys.readouterr().err
    (step,) = replayed(capsys, "less.zip", "model.path=model")
    assert (step["step"], step["agrees"]) == (5, True)


@pytest.mark.parametrize(
    "name", ["../out.json", "/tmp/out.json", "a/../../out.json", "C:\\out.json", "code/x.so", "x.py", "link.json"]
)
def test_an_archive_that_leaves_its_folder_is_refused(home: Path, name: str, capsys: Screen) -> None:
    with zipfile.ZipFile("bad.zip", "w") as archive:
        archive.writestr("config.yaml", "# trueline grpo\n")
        archive.writestr(name, "{}")
        if name == "link.json":
            archive.filelist[-1].external_attr = 0o120777 << 16
    assert main(["replay", "bad.zip"]) == 2
    assert "nothing was opened" in capsys.readouterr().err
    assert not (home.parent / "out.json").exists()


def test_an_archive_that_would_run_code_is_refused(home: Path, capsys: Screen) -> None:
    assert main(["replay", "five", "--step", "5", "--pack", "bug.zip"]) == 0
    run = home / "opened"
    with zipfile.ZipFile("bug.zip") as archive:
        archive.extractall(run)
    change(run, 5, lambda about, _: about["config"]["algorithm"].update(loss="os:system"))
    shutil.make_archive("evil", "zip", run)
    assert main(["replay", "evil.zip"]) == 2
    assert "algorithm.loss=os:system is code of the archive: read it, and add --trust-code" in capsys.readouterr().err
    np.savez(run / "samples/step_000005.npz", about=np.array([{"pickled": 1}], dtype=object))
    shutil.make_archive("evil", "zip", run)
    assert main(["replay", "evil.zip"]) == 2
    assert "not the kept samples of a step (Object arrays cannot be loaded" in capsys.readouterr().err
    (home / "text.zip").write_text("no archive")
    assert main(["replay", "text.zip"]) == 2
    assert "not an archive of `trueline replay --pack`" in capsys.readouterr().err


# Ranks in processes


def start(home: Path, *words: str) -> str:
    """Run a command in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "trueline.cli", *words]
    ended = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_steps_of_two_ranks_are_replayed_in_one_process(home: Path, capsys: Screen) -> None:
    """Eight steps through Ray; one process computes them from the base model, and an archive has all of them."""
    words = ["training.ranks=2", "rollout.engine=hf", "steps=8", "minibatches=2", "checkpoint.every=4", "--name", "ray"]
    start(home, *WORDS, *words)
    found = replayed(capsys, "ray", "--steps", "1-5")
    assert len(found) == 5 and all(step["agrees"] and gap(step) < 1e-5 for step in found)
    assert main(["replay", "ray", "--steps", "1-8", "--pack", "bug.zip"]) == 0
    assert Path("bug.zip").stat().st_size < 20 * 2**20
    assert all(step["agrees"] for step in replayed(capsys, "bug.zip", "--steps", "1-8"))


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "engine", "ranks"), [("grpo", "fsdp2", 1), ("ppo", "deepspeed", 2)])
def test_steps_in_bfloat16_have_float32_masters_in_one_process(home: Path, verb: str, engine: str, ranks: int) -> None:
    """One rank of FSDP2 gives the same bits; several ranks of DeepSpeed add gradients up in bfloat16."""
    layout = [f"{model}.{key}" for model in ("training", "critic") for key in (f"engine={engine}", f"ranks={ranks}")]
    words = ["model.dtype=bfloat16", "rollout.engine=hf", "steps=3", "minibatches=2", "checkpoint.every=2"]
    start(home, verb, *WORDS[1:], *words, *layout, "algorithm.kl.coefficient=0.01", "--name", "half")
    found = json.loads(start(home, "replay", "half", "--steps", "1-3", "--json"))
    assert len(found) == 3 and all(step["agrees"] and step["logged"]["grad_norm"] for step in found)
    assert ranks == 2 or all(gap(step) == gap(step, "grad_norm") == step["tokens"]["largest"] == 0 for step in found)
