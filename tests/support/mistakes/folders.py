import shutil
from pathlib import Path

from tests.support.mistakes.home import GRPO, SFT, Mistake
from tests.support.tiny import make_tiny_model
from trueline.cli import main

LAST = "checkpoints/step_000002"
WEIGHTS = f"{LAST}/model/model.safetensors"
RESUME = ["sft", "--resume", "steps=3", "--name"]
DAMAGED = r" (is not a safetensors file, or damaged|has only \d+ of its \d+ bytes: download).* again"


def add_files(folder: Path) -> None:
    """Add runs whose last checkpoint is damaged, one way each, and models that are."""
    data = ["--data", str(folder / "sft.jsonl"), f"folder={folder / 'runs'}", "--name", "whole", "steps=2"]
    model = ["--model", str(make_tiny_model(folder / "small", tied=True)), "runtime=local"]
    assert main(["sft", *model, *data, "checkpoint.every=1", "training.learning_rate=1e-3", "samples_per_step=1"]) == 0
    whole = folder / "runs" / "whole"
    for name in ("lost", "cut", "emptied", "stateless", "single"):
        shutil.copytree(whole, folder / "runs" / name)
    (folder / "runs/lost" / WEIGHTS).unlink()
    truncate(folder / "runs/cut" / WEIGHTS, 1000)
    truncate(folder / "runs/emptied" / WEIGHTS, 0)
    (folder / "runs/stateless" / LAST / "training.safetensors").unlink()
    shutil.rmtree(folder / "runs/single/checkpoints/step_000001")
    (folder / "runs/single" / LAST / "random-0.safetensors").unlink()
    for name, size in (("cut_model", 100_000), ("empty_model", 0), ("no_header", 100)):
        shutil.copytree(folder / "model", folder / name)
        truncate(folder / name / "model.safetensors", size)
    shutil.copytree(folder / "judge", folder / "cut_judge")
    truncate(folder / "cut_judge" / "model.safetensors", 100_000)
    shutil.copytree(folder / "model", folder / "shards")
    index = '{"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (folder / "shards" / "model.safetensors.index.json").write_text(index)


def truncate(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


MISTAKES: list[Mistake] = [
    ([*GRPO, "name=taken"], r"taken exists: add --resume to continue that run, or choose another --name"),
    ([*GRPO, "name=a/b"], r"name: .*\(got 'a/b'\)"),
    ([*GRPO, "folder=notes.txt"], r"folder=notes.txt: .* cannot be written .*choose another place"),
    ([*GRPO, "--resume", "--name", "never"], r"never is not a run that can be resumed .*leave --resume out"),
    ([*GRPO, "--resume", "folder=nowhere"], r"no grpo run to resume in .*nowhere: name its place with folder="),
    ([*GRPO, "--restart"], r"--restart needs --resume, .*: give both, or neither"),
    (["export", "split", "out"], r"split: neither a checkpoint nor the folder of a run with checkpoints"),
    ([*RESUME, "lost"], r"lost/.*: model/model.safetensors is missing .*remove the folder to resume from step_000001"),
    ([*RESUME, "cut"], r"cut/.*: model/model.safetensors is missing or has changed; remove the folder to resume"),
    ([*RESUME, "emptied"], r"emptied/.*: model/model.safetensors is missing or has changed; remove the folder"),
    ([*RESUME, "stateless"], r"stateless/.*: training.safetensors is missing .*to resume from step_000001"),
    ([*RESUME, "single"], r"random-0.safetensors is missing .*\(the only one\) and start over with --resume --restart"),
    ([*RESUME, "elsewhere/run"], r"elsewhere/run is not a run that can be resumed .*leave --resume out"),
    (
        ["export", "runs/cut", "out"],
        r"model/model.safetensors is missing .*remove the folder to resume from step_000001",
    ),
    (
        [*SFT, "--data", "sft.jsonl", "model.path=runs/lost"],
        r"step_000002/model: 1 of 1 weight files are missing, such as model.safetensors: copy or",
    ),
    ([*SFT, "--data", "sft.jsonl", "model.path=cut_model"], f"cut_model/model.safetensors{DAMAGED}"),
    ([*SFT, "--data", "sft.jsonl", "model.path=empty_model"], f"empty_model/model.safetensors{DAMAGED}"),
    ([*GRPO, "model.path=no_header"], f"no_header/model.safetensors{DAMAGED}"),
    (
        [*GRPO, "model.path=shards"],
        r"model.path=shards: 1 of 2 weight files are missing, such as model-00002-of-00002.safetensors: copy or",
    ),
    ([*GRPO, "reward.function=cut_judge"], f"cut_judge/model.safetensors{DAMAGED}"),
    (["eval", "--model", "cut_model", "--eval-data", "prompts.jsonl", "--reward", "mine.py:digits"], DAMAGED),
    (
        [*GRPO, "cluster.address=127.0.0.1:1"],
        r"address=127.0.0.1:1: nothing answers there .*RAY_AUTH_MODE=token ray st",
    ),
    ([*GRPO, "cluster.address=localhost"], r"cluster.address=localhost: give HOST:PORT \(Ray's usual port is 6379\)"),
    ([*GRPO, "cluster.address=no.such.host.invalid:6379"], r"the host no.such.host.invalid cannot be resolved"),
    ([*GRPO, "cluster.address=ray://127.0.0.1:10001"], r"cluster.address: ray:// .*set HOST:PORT or auto"),
]
