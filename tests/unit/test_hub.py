"""`trueline export` writes a model card, and uploads a model to the Hub; here to a small one on this machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trueline
from tests.support.hub import TOKEN, small_hub
from tests.support.tiny import make_tiny_model
from trueline.cli import main
from trueline.hub import push
from trueline.report.card import write_card

ROWS = [{"prompt": f"{number}:", "answer": str(number)} for number in range(8)]
VERSIONS = {"torch": "2.13.0", "vllm": "0.32"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> trueline.Run:
    """Two steps of GRPO on a held-out set, whose folder lies below a secret place."""
    place = tmp_path_factory.mktemp("secret_place")
    make_tiny_model(place / "model", tied=True)
    keys = {"runtime": "local", "prompts_per_step": 2, "rollout": {"max_new_tokens": 4}, "steps": 3}
    small = {"monitoring": {"tensorboard": False}, "checkpoint": {"every": 1, "keep": 3}, "eval_data": ROWS[:2]}
    found = trueline.train(
        "grpo", model=place / "model", data=ROWS, reward="exact", folder=place, name="first", **keys, **small
    )
    plan = found.folder / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"versions": VERSIONS}))
    return found


def test_a_card_says_what_was_trained_how_and_with_what_result(run: trueline.Run, tmp_path: Path) -> None:
    assert main(["export", f"{run.folder}/checkpoints/step_000002", f"{tmp_path}/model"]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    rows = {row["step"]: row for row in run.metrics.to_dict("records")}
    assert card.startswith(
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- trueline\n- grpo\n"
    )
    assert "Trained with `trueline grpo` from `model`: checkpoint step_000002 of the run `first`." in card
    ends = [f"{rows[step]['reward/mean']:.4g} (step {step})" for step in (1, 2)]  # what came after is another model
    assert f"| `reward/mean` | {' | '.join(ends)} |" in card and "step 3" not in card
    assert f"| `evaluation/reward` | {rows[0]['evaluation/reward']:.4g} (step 0) |" in card
    assert "advantage  group_norm" in card and "  prompts_per_step=2 \\\n" in card and "  steps=3 \\\n" in card
    assert "torch 2.13.0, vllm 0.32" in card and "secret_place" not in card and str(Path.home()) not in card
    assert "![reward/mean](curve.svg)" in card and "<svg" in (tmp_path / "model" / "curve.svg").read_text()


def test_a_run_records_the_versions_that_compute_it(run: trueline.Run, tmp_path: Path) -> None:
    import torch

    from trueline.monitoring.run_folder import RunFolder

    (folder := RunFolder(tmp_path)).write_plan("", [])
    assert json.loads(folder.plan.read_text())["versions"]["torch"] == torch.__version__


def export(run: trueline.Run, target: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the Hub's client reads its environment once."""
    command = [sys.executable, "-m", "trueline.cli", "export", str(run.folder), str(target), *words]
    home = {"HF_HOME": str(target.parent / "home"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    given = {name: value for name, value in os.environ.items() if "HF_" not in name and "OFFLINE" not in name}
    return subprocess.run(command, env=given | home | environment, capture_output=True, text=True)


def test_a_checkpoint_without_its_run_has_no_card(run: trueline.Run, tmp_path: Path) -> None:
    shutil.copytree(run.model.parent, tmp_path / "copied" / "checkpoints" / run.model.parent.name)
    (tmp_path / "model").mkdir()
    write_card(tmp_path / "copied" / "checkpoints" / run.model.parent.name, tmp_path / "model", lambda verb: {})
    assert not any((tmp_path / "model").iterdir())


def test_nothing_is_uploaded_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(trueline.ConfigError, match="--push-to-hub me/tiny: HF_HUB_OFFLINE is set: unset it"):
        push(tmp_path, "me/tiny")


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--public",)])
def test_a_model_is_uploaded_whole_and_privately_unless_asked(
    run: trueline.Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    with small_hub() as hub:
        done = export(run, tmp_path / "m", "--push-to-hub", "me/tiny", *words, HF_ENDPOINT=hub.address, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert f"pushed:  {hub.address}/me/tiny/commit/" in done.stderr and TOKEN not in done.stdout + done.stderr
    assert hub.private == {"me/tiny": not words}
    written = {str(file.relative_to(tmp_path / "m")): file.read_bytes() for file in (tmp_path / "m").rglob("*.*")}
    assert {name: hub.files.get(name) for name in written} == written and "model.safetensors" in written


@pytest.mark.slow
def test_what_the_hub_refuses_is_said_and_the_model_stays(run: trueline.Run, tmp_path: Path) -> None:
    with small_hub() as hub:
        done = export(run, tmp_path / "m", "--push-to-hub", "me/tiny", HF_ENDPOINT=hub.address, HF_TOKEN="hf_other")
    assert done.returncode == 2 and hub.refused and not hub.private
    assert "--push-to-hub me/tiny: " in done.stderr and "is written; check the name, log in with" in done.stderr
    assert (tmp_path / "m" / "README.md").is_file() and "hf_other" not in done.stderr
    away = export(run, tmp_path / "l", "--push-to-hub", "me/tiny", HF_ENDPOINT=hub.address, HF_TOKEN=TOKEN)
    assert away.returncode == 2 and "--push-to-hub me/tiny: " in away.stderr and "is written; check" in away.stderr
    alone = export(run, tmp_path / "o", "--public")
    assert alone.returncode == 2 and "--public needs --push-to-hub OWNER/NAME" in alone.stderr
    assert not (tmp_path / "o").exists()
