"""The wiring of the offline loop: what a task asks for besides its rows, seen from whole runs in this process."""

import json
from pathlib import Path
from typing import Any

import pytest

from trueline.cli import main
from trueline.training.worker import Worker

ROWS: dict[str, list[dict[str, Any]]] = {
    "rm": [{"prompt": f"{n}:", "chosen": "abc", "rejected": "123"[: 1 + n % 3]} for n in range(12)],
    "kto": [{"prompt": f"{n}:", "completion": "abc", "label": n % 2 == 0} for n in range(12)],
}


def run(verb: str, model: Path, folder: Path, *more: str) -> list[dict[str, float]]:
    """What two steps report, the row before the first included."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[verb]))
    words = ["--model", str(model), "--data", f"{folder}/rows.jsonl", "--name", "run", f"folder={folder}"]
    small = ["samples_per_step=4", "steps=2", "training.learning_rate=1e-3", "evaluation.share=0.25"]
    assert (
        main([verb, *words, *small, "runtime=local", "monitoring.tensorboard=false", "monitoring.doctor=false", *more])
        == 0
    )
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_reward_model_is_saved_with_the_scale_of_its_last_evaluation(model_folder: Path, tmp_path: Path) -> None:
    last = run("rm", model_folder, tmp_path)[-1]
    saved = json.loads((tmp_path / "run/checkpoints/step_000002/model/config.json").read_text())
    chosen, rejected = (last[f"evaluation/reward_model/{name}"] for name in ("chosen", "rejected"))
    assert saved["reward_mean"] == pytest.approx((chosen + rejected) / 2, rel=1e-4, abs=1e-6)
    assert saved["reward_std"] > 0


def test_what_a_loss_finds_in_a_minibatch_is_reported(model_folder: Path, tmp_path: Path) -> None:
    before, first, second = run("kto", model_folder, tmp_path)
    assert "evaluation/loss" in before
    assert first["kto/kl"] == pytest.approx(0.0, abs=1e-4)  # the model is its reference still
    assert second["kto/kl"] >= 0.0


def test_a_run_that_must_not_write_leaves_no_checkpoint(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it take memory for one; what would need one says why there is none."""
    monkeypatch.delattr(Worker, "prepare_saving")
    run("kto", model_folder, tmp_path, "checkpoint.save=false")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert "done: step 2 of 2; nothing was saved (checkpoint.save=false)" in capsys.readouterr().out
    place = [f"folder={tmp_path}", "--name", "run"]
    for words, said in (
        (["kto", "--resume", *place], "has no checkpoint yet: add --restart to start it over"),
        (["export", f"{tmp_path}/run", f"{tmp_path}/out"], "name one of these"),
        (["kto", "--model", f"{tmp_path}/run", "--data", f"{tmp_path}/rows.jsonl"], "saved nothing (checkpoint.save="),
        (["raft", "--model", "m", "--data", "d", "checkpoint.save=false"], "each round starts from the last one"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err.replace("\n", " ")
