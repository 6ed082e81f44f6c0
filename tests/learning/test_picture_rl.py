"""Verbs that sample learn from pictures through the real loop in one process, and each wire of them is looked at."""

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModel

from tests.support.model_table import WITH_PICTURES, check_cell
from tests.support.pictures import MAKERS, make_picture
from trueline.cli import main
from trueline.config.model import ModelConfig
from trueline.models.vision import load_processor
from trueline.report.page import write_report
from trueline.report.runs import find_runs

ROWS = 8
REWARD = """
def right(reply, label, images):
    (image,) = images
    assert image.mode == "RGB" and image.size[1] == 24
    return float(label in reply) + image.getpixel((0, 0))[0] / 10_000
"""
KEYS = ["runtime=local", "rollout.engine=hf", "rollout.max_new_tokens=4", "monitoring.tensorboard=false", "seed=1"]
TRAINED = ["steps=2", "prompts_per_step=4", "algorithm.group_size=4", "training.learning_rate=1e-3"]
ROUND = ["rounds=1", "prompts_per_round=8", "samples=4", "training.samples_per_step=2", "training.epochs=1"]
PRESETS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "reinforce++_baseline", "remax"]
QUICK = ("ppo",)  # others differ from them in a loss or an average
PRESETS += ["ppo", "vapo"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("pictures"), "idefics3")


def make_home(folder: Path, family: str) -> Path:
    MAKERS[family](folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rows = []
    for number in range(ROWS):
        make_picture(number, 40 + number).save(folder / f"{number}.png")
        asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
        rows.append({"prompt": asked, "image": f"{number}.png", "label": "ab"[number % 2]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def start(home: Path, verb: str, *words: str, name: str = "") -> int:
    data = ["--eval-data" if verb == "eval" else "--data", f"{home}/rows.jsonl"]
    reward = [] if "--reward" in words else ["--reward", f"{home}/reward.py:right"]
    named = ["--model", f"{home}/model", *data, *reward, "--name", name or verb]
    return main([verb, *named, f"folder={home}", *KEYS, *words])


def metrics(home: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "preset", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in PRESETS]
)
def test_every_preset_trains_on_what_the_engine_saw(preset: str, home: Path) -> None:
    """Trainer and reference have the engine's log-probs only if both get the picture of every sampled sequence."""
    own = {"dapo": ["algorithm.dynamic_sampling.enabled=false"], "vapo": ["algorithm.critic_warmup_steps=0"]}
    assert start(home, preset, *TRAINED, "algorithm.kl.coefficient=0.01", *own.get(preset, [])) == 0
    first, last = metrics(home, preset)[-2:]
    assert first["mismatch/logprob_gap_max"] < 1e-4 and last["mismatch/logprob_gap_max"] < 1e-4
    assert abs(first["policy/sequence_kl"]) < 1e-4
    assert not math.isclose(first["reward/mean"], round(first["reward/mean"]))  # the reward has looked, too


@pytest.mark.models
@pytest.mark.parametrize("family", [pytest.param(one, marks=pytest.mark.slow) for one in WITH_PICTURES])
def test_a_family_is_sampled_and_trained(family: str, tmp_path: Path) -> None:
    keys = [*TRAINED, "algorithm.group_size=8", "rollout.max_new_tokens=16"]
    # A part of its layers is recurrent.
    keys += ["training.packing=false", "reference.packing=false"] if family == "qwen3_5" else []
    assert start(make_home(tmp_path, family), "grpo", *keys, name="run") == 0
    rows = metrics(tmp_path, "run")[-2:]
    assert max(row["mismatch/logprob_gap_max"] for row in rows) < 1e-4
    assert any(row["grad_norm"] > 0 for row in rows)  # in one of them, some rewards may be equal
    check_cell(WITH_PICTURES[family], "GRPO step", "exact")


def test_steps_are_streamed_and_sampled_ahead_with_pictures(home: Path) -> None:
    for name, keys in {"streamed": ["training.stream=true"], "ahead": ["rollout.max_staleness=1"]}.items():
        assert start(home, "grpo", *TRAINED, "algorithm.kl.coefficient=0", *keys, name=name) == 0
        assert metrics(home, name)[-2]["mismatch/logprob_gap_max"] < 1e-4


def rows_of(home: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / name / "transcripts.jsonl").read_text().splitlines()]


def mean_color(file: Path) -> np.ndarray:
    return np.asarray(Image.open(file).convert("RGB"), float).mean((0, 1))


def check_thumbnails(home: Path, name: str) -> set[str]:
    """Every transcript names the picture of its prompt, whose corner the reward has added; return all names."""
    rows, colors = rows_of(home, name), [mean_color(home / f"{number}.png") for number in range(ROWS)]
    for row in rows:
        (file,) = row["images"]
        number, height = np.subtract(Image.open(home / name / file).size, (40, 0))
        red = Image.open(home / f"{number}.png").getpixel((0, 0))[0]
        assert height == 24 and row["reward"] % 1 == pytest.approx(red / 10_000)
        distances = [np.abs(mean_color(home / name / file) - color).max() for color in colors]
        assert distances[number] < 4 and np.argmin(distances) == number
    named = {row["images"][0] for row in rows}
    assert named <= {f"pictures/{file.name}" for file in (home / name / "pictures").iterdir()}
    return named


def test_transcripts_name_thumbnails_that_the_page_shows(home: Path, tmp_path: Path) -> None:
    keys = ["prompts_per_step=4", "algorithm.group_size=2", "evaluation.every=1", "evaluation.samples=1"]
    keys += [f"evaluation.data={home}/rows.jsonl", "checkpoint.every=1", "training.learning_rate=1e-3"]
    assert start(home, "grpo", *keys, "steps=1", name="shown") == 0
    before = {file.name: file.stat().st_mtime_ns for file in (home / "shown" / "pictures").iterdir()}
    first = check_thumbnails(home, "shown")
    assert {row["purpose"] for row in rows_of(home, "shown")} == {"train", "evaluate"}
    assert {f"pictures/{name}" for name in before} == first  # of what is written, and of nothing else
    assert start(home, "grpo", "--resume", "steps=3", name="shown") == 0
    named = check_thumbnails(home, "shown")
    assert first <= named and {row["step"] for row in rows_of(home, "shown")} == {0, 1, 2, 3}
    after = {file.name: file.stat().st_mtime_ns for file in (home / "shown" / "pictures").iterdir()}
    assert {f"pictures/{name}" for name in after} == named and before.items() <= after.items()
    page = write_report(find_runs([str(home / "shown")]), tmp_path / "page.html").read_text()
    urls = re.findall(r"data:image/jpeg;base64,([\w+/=]+)", page)
    assert sorted(map(base64.b64decode, urls)) == sorted((home / "shown" / name).read_bytes() for name in named)


def test_samples_name_their_pictures_and_are_trained_on(home: Path) -> None:
    assert start(home, "generate", "samples=4", "keep=best", "pairs=true") == 0
    row = json.loads((home / "generate" / "kept.jsonl").read_text().splitlines()[0])
    assert (home / "generate" / row["images"][0]).read_bytes() in [one.read_bytes() for one in home.glob("*.png")]
    keys = ["runtime=local", f"folder={home}", "steps=1", "samples_per_step=2", "checkpoint.save=false"]
    for verb, file in {"sft": "kept", "dpo": "pairs"}.items():
        words = ["--model", f"{home}/model", "--data", f"{home}/generate/{file}.jsonl", "--name", verb]
        assert main([verb, *words, *keys]) == 0
    assert start(home, "generate", "samples=4", "keep=best", "pairs=true", "--resume") == 0


@pytest.mark.slow
def test_eval_and_rounds_read_pictures(home: Path) -> None:
    assert start(home, "eval") == 0
    for verb in ("raft", "iterative_dpo"):
        assert start(home, verb, *ROUND) == 0


@pytest.fixture(scope="module")
def judge(home: Path) -> Path:
    """A run of rm: the better reply to a picture is the one that its row names."""
    rows = [json.loads(line) for line in (home / "rows.jsonl").read_text().splitlines()]
    pairs = [{**row, "chosen": row["label"], "rejected": "ba"["ab".index(row["label"])]} for row in rows]
    (home / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    keys = ["runtime=local", f"folder={home}", "steps=12", "samples_per_step=8", "training.learning_rate=3e-3"]
    keys += ["--eval-data", f"{home}/pairs.jsonl", "--name", "rm"]
    assert main(["rm", "--model", f"{home}/model", "--data", f"{home}/pairs.jsonl", *keys]) == 0
    assert metrics(home, "rm")[-1]["evaluation/reward_model/accuracy"] == 1.0  # of rows in which only the picture tells
    return home / "rm"


def test_a_reward_model_sees_the_pictures_of_a_completion(home: Path, judge: Path) -> None:
    words = ["samples=4", "--reward", str(judge)]
    assert start(home, "generate", *words, name="judged") == 0
    folder = judge / "checkpoints" / "step_000012" / "model"
    backbone = AutoModel.from_pretrained(folder)
    weight = load_file(folder / "model.safetensors")["score.weight"]
    processor = load_processor(ModelConfig(path=str(folder)), "idefics3")
    rows = [json.loads(line) for line in (home / "judged" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == ROWS
    for row in rows:
        image = Image.open(home / "judged" / row["images"][0])
        asked = processor.apply_chat_template(row["prompt"], add_generation_prompt=True)
        for one in row["completions"]:
            batch = processor(text=[f"{asked}{one['reply']}</s>"], images=[[image]], return_tensors="pt")
            with torch.no_grad():
                expected = weight @ backbone(**batch).last_hidden_state[0, -1]
            assert one["reward"] == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.slow
def test_reward_models_and_critics_of_pictures_train_a_policy(home: Path, judge: Path) -> None:
    """The critic of the second run begins as the reward model, that of the third as named, and trains its tower."""
    runs = {"judged_grpo": ["grpo"], "judged_ppo": ["ppo"]}
    for name, words in runs.items():
        assert start(home, *words, *TRAINED, "--reward", str(judge), name=name) == 0
        assert metrics(home, name)[-1]["mismatch/logprob_gap_max"] < 1e-4
    keys = [f"critic.path={judge}", "critic.train_vision=all", "critic.learning_rate=1e-3"]
    assert start(home, "ppo", *TRAINED, *keys, name="seeing") == 0
    before = load_file(judge / "checkpoints" / "step_000012" / "model" / "model.safetensors")
    after = load_file(home / "seeing" / "checkpoints" / "step_000002" / "critic" / "model" / "model.safetensors")
    changed = {name.split(".")[1] for name, one in after.items() if not torch.equal(one, before[name])}
    assert before.keys() == after.keys() and changed == {"text_model", "vision_model", "connector", "weight"}
    policy = load_file(home / "seeing" / "checkpoints" / "step_000002" / "model" / "model.safetensors")
    start_of = load_file(home / "model" / "model.safetensors")
    assert all(torch.equal(one, start_of[name]) for name, one in policy.items() if "vision_model" in name)


def test_adapters_on_the_tower_reach_the_engine(home: Path) -> None:
    """The engine holds merged weights, and a policy without its adapters is the reference."""
    keys = [
        "model.lora.rank=4",
        "model.train_vision=all",
        "training.learning_rate=1e-2",
        "algorithm.kl.coefficient=0.01",
    ]
    assert start(home, "grpo", *TRAINED[:-1], *keys, name="adapted") == 0
    first, last = metrics(home, "adapted")[-2:]
    assert first["mismatch/logprob_gap_max"] < 1e-4 and last["mismatch/logprob_gap_max"] < 1e-4
    assert abs(first["policy/sequence_kl"]) < 1e-4 < abs(last["policy/sequence_kl"])
    saved = load_file(home / "adapted" / "checkpoints" / "step_000002" / "model" / "adapter_model.safetensors")
    learned = {name.split(".")[3] for name, one in saved.items() if "lora_B" in name and one.any()}
    assert learned == {"text_model", "vision_model", "connector"}


def test_checkpoints_would_lack_a_frozen_tower(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(home, "grpo", *TRAINED, "checkpoint.model=last", name="last") != 0
    assert "checkpoint.model=last keeps only what is trained" in capsys.readouterr().err
