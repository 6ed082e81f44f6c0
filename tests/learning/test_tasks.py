"""Every offline task learns through the real loop, in one process, and does not depend on how a step is cut."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.support.tiny import make_tiny_model
from tests.support.tool_calls import TOOL_TALK, TOOL_TEMPLATE, TOOLS
from trueline.cli import main
from trueline.data.types import Sample
from trueline.models.loading import padding_token
from trueline.training.group import ModelGroup
from trueline.verbs import TASK_VERBS

STEPS = 12
PROMPTS = 16


def row(number: int, verb: str) -> dict[str, Any]:
    """A rule that a small model finds quickly: good answers are letters, bad ones digits."""
    prompt, good, bad = f"{number}:", "abc" + "de"[: number % 3], "123" + "45"[: number % 2]
    if verb in ("sft", "distill"):
        return {"prompt": prompt, "completion": good}
    if verb == "kto":
        return {"prompt": prompt, "completion": good if number % 2 else bad, "label": bool(number % 2)}
    if verb == "prm":
        return {"prompt": prompt, "completions": [good, bad], "labels": [True, False]}
    return {"prompt": prompt, "chosen": good, "rejected": bad}


def train(folder: Path, verb: str, *words: str) -> list[dict[str, float]]:
    assert run(folder, verb, *words) == 0
    return read(folder / "run")


def run(folder: Path, verb: str, *words: str) -> int:
    if not (folder / "model").exists():
        make_tiny_model(folder / "model", tied=True)
        make_tiny_model(folder / "teacher", tied=True, seed=1)
    data = folder / f"{verb}.jsonl"
    data.write_text("".join(json.dumps(row(number, verb)) + "\n" for number in range(PROMPTS)))
    named = ["--model", f"{folder}/model", "--data", str(data), "--eval-data", str(data), "--name", "run"]
    small = ["samples_per_step=8", "training.learning_rate=1e-3", "checkpoint.every=0", "evaluation.every=0"]
    local = [
        "runtime=local",
        f"folder={folder}",
        f"steps={STEPS}",
        "monitoring.tensorboard=false",
        "monitoring.doctor=false",
    ]
    teacher = [f"distill.teacher={folder}/teacher"] if verb == "distill" else []
    return main([verb, *named, *small, *local, *teacher, *words])


def read(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def newest(folder: Path, step: int = STEPS) -> Path:
    return folder / "run" / "checkpoints" / f"step_{step:06d}"


@pytest.mark.parametrize("verb", list(TASK_VERBS))
def test_task_lowers_its_held_out_loss(verb: str, tmp_path: Path) -> None:
    rows = train(tmp_path, verb)
    first, last = rows[0]["evaluation/loss"], rows[-1]["evaluation/loss"]
    assert last < 0.9 * first
    accuracies = [name for name in rows[-1] if name.endswith("/accuracy") and name.startswith("evaluation/")]
    assert bool(accuracies) == (verb not in ("sft", "distill"))
    assert all(rows[-1][name] > 0.8 for name in accuracies)


@pytest.mark.parametrize("verb", ["sft", "dpo", "kto", "rm", "prm", "orpo", "distill"])
def test_a_step_does_not_depend_on_its_micro_batches(verb: str, tmp_path: Path) -> None:
    """KTO's z is of the whole minibatch, so one answer at a time gives what all at once give."""
    smallest = 2 if row(0, verb).keys() >= {"chosen"} else 1
    whole = train(tmp_path / "whole", verb, "steps=3")
    parts = train(tmp_path / "parts", verb, "steps=3", f"training.micro_batch_samples={smallest}")
    for one, other in zip(whole, parts, strict=True):
        for key in {"loss", "grad_norm", "kto/kl", "evaluation/loss"} & one.keys():
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-6), key
    ends = [load_file(newest(tmp_path / name, 3) / "model/model.safetensors") for name in ("whole", "parts")]
    for name, tensor in ends[0].items():
        assert torch.linalg.norm(tensor - ends[1][name]) / torch.linalg.norm(tensor) < 1e-5, name


@pytest.mark.parametrize("verb", ["dpo", "kto", "sft"])
def test_a_resumed_run_equals_an_uninterrupted_one(verb: str, tmp_path: Path) -> None:
    """Also without the reference's log-probs on disk: they come from the starting model, not from the checkpoint."""
    train(tmp_path / "whole", verb, "steps=6")
    train(tmp_path / "parts", verb, "steps=3")
    (tmp_path / "parts/run/reference.safetensors").unlink(missing_ok=True)
    assert main([verb, "--resume", "--name", "run", f"folder={tmp_path}/parts", "steps=6"]) == 0
    ends = [load_file(newest(tmp_path / name, 6) / "model/model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.slow
def test_muon_learns_and_resumes_from_the_command_line(tmp_path: Path) -> None:
    rows = train(tmp_path / "whole", "sft", "training.optimizer=muon")
    assert rows[-1]["evaluation/loss"] < 0.9 * rows[0]["evaluation/loss"]
    train(tmp_path / "parts", "sft", "training.optimizer=muon", "steps=5")
    assert main(["sft", "--resume", "--name", "run", f"folder={tmp_path}/parts", f"steps={STEPS}"]) == 0
    ends = [load_file(newest(tmp_path / name) / "training.safetensors") for name in ("whole", "parts")]
    assert sum(name.endswith("_proj.weight/momentum_buffer") for name in ends[0]) == 2 * 7  # of two layers, all
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_a_trained_adapter_merges_into_the_same_model(tmp_path: Path) -> None:
    rows = train(tmp_path, "sft", "model.lora.rank=4", "training.learning_rate=1e-2")
    assert rows[-1]["evaluation/loss"] < 0.9 * rows[0]["evaluation/loss"]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    tokens = torch.arange(3, 40)[None]
    merged, adapted, start = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name)(tokens).logits for name in ("merged", "adapter", "model")
    )
    assert torch.linalg.norm(merged - adapted) / torch.linalg.norm(adapted) < 1e-5
    assert torch.linalg.norm(merged - start) / torch.linalg.norm(start) > 1e-2


def test_a_reward_model_scores_alike_in_plain_transformers(tmp_path: Path) -> None:
    """The documented two-liner; mean and deviation of the held-out scores are saved with it."""
    rows = train(tmp_path, "rm")
    model = AutoModelForSequenceClassification.from_pretrained(newest(tmp_path) / "model")
    assert model.config.reward_std > 0
    assert model.config.pad_token_id != model.config.eos_token_id
    scores = {}
    tokenizer = AutoTokenizer.from_pretrained(newest(tmp_path) / "model")
    assert padding_token(tokenizer) == model.config.pad_token_id
    for kind in ("chosen", "rejected"):
        texts = [row(number, "rm")["prompt"] + row(number, "rm")[kind] for number in range(PROMPTS)]
        ids = [torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]) for text in texts]
        with torch.no_grad():
            scores[kind] = [float(model(one).logits[0, 0]) for one in ids]
        assert sum(scores[kind]) / PROMPTS == pytest.approx(rows[-1][f"evaluation/reward_model/{kind}"], abs=1e-4)


def test_a_step_that_is_not_finite_is_skipped_and_stops_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate that breaks the model: what was trained before stays in its checkpoint."""
    words = [
        "training.learning_rate=1e30",
        "training.max_bad_steps=1",
        "checkpoint.every=1",
        "training.max_grad_norm=0",
    ]
    with pytest.raises(AssertionError):
        train(tmp_path, "sft", *words)
    said = capsys.readouterr().out
    assert "not finite" in said and "training.max_bad_steps=1" in said
    assert newest(tmp_path, 1).is_dir()


def test_a_mixture_of_formats_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are read as what they are, drawn about 1 to 3, and the loss of what they are together falls."""
    train(tmp_path, "sft", "steps=1")
    seen: list[Sample] = []
    whole = ModelGroup.update

    def spy(self: ModelGroup, samples: list[Sample], *args: Any, **named: Any) -> dict[str, float]:
        seen.extend(samples)
        return whole(self, samples, *args, **named)

    monkeypatch.setattr(ModelGroup, "update", spy)
    other = tmp_path / "more.jsonl"
    other.write_text("".join(json.dumps({"text": f"plain text {number}"}) + "\n" for number in range(20)))
    words = ["--model", f"{tmp_path}/model", "--name", "mixed", "runtime=local", f"folder={tmp_path}", "steps=8"]
    mixture = "data.mixture={" + f"{tmp_path}/sft.jsonl: 1, {other}: 3" + "}"
    assert main(["sft", *words, mixture, "samples_per_step=8", "training.learning_rate=1e-3"]) == 0
    said = capsys.readouterr().out
    assert "format     completion" in said and "format     text" in said
    documents = [sample for sample in seen if sample.sampled_tokens() == sample.length() - 1]  # all of them is learnt
    assert len(seen) == 64
    assert 40 <= len(documents) <= 56
    losses = [row["loss"] for row in read(tmp_path / "mixed") if row["step"]]
    assert fmean(losses[-3:]) < fmean(losses[:3])


def test_a_rate_that_moves_nothing_is_told_and_one_that_does_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate, warned in (("1e-6", True), ("1e-3", False)):
        train(tmp_path / rate, "sft", "steps=20", f"training.learning_rate={rate}")
        assert ("in 20 steps loss has not moved beyond its noise" in capsys.readouterr().out) is warned


def test_a_template_file_goes_with_the_model_and_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any folder; and the exported tokenizer renders what was learnt."""
    make_tiny_model(tmp_path / "model", tied=True)
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TOOL_TALK, "tools": TOOLS}) + "\n")
    (tmp_path / "chat.jinja").write_text("{{ greeting }}" + TOOL_TEMPLATE)
    monkeypatch.chdir(tmp_path)
    named = ["--model", "model", "--data", f"{tmp_path}/talk.jsonl", "--name", "run", "data.chat_template=chat.jinja"]
    named += ["data.chat_template_kwargs={greeting: hi}"]
    local = [
        "runtime=local",
        f"folder={tmp_path}",
        "samples_per_step=1",
        "monitoring.tensorboard=false",
        "monitoring.doctor=false",
    ]
    assert main(["sft", *named, *local, "steps=1"]) == 0
    monkeypatch.chdir("/")
    assert main(["sft", "--resume", "--name", "run", f"folder={tmp_path}", "steps=2"]) == 0
    for step in (1, 2):
        tokenizer = AutoTokenizer.from_pretrained(newest(tmp_path, step) / "model")
        assert tokenizer.chat_template.endswith(TOOL_TEMPLATE)
    assert tokenizer.apply_chat_template(TOOL_TALK[:2], tools=TOOLS, tokenize=False) == (
        'hi<tools>add;</s>\n<user>1+1=</s>\n<assistant><call>add{"a": 1, "b": 1}</s>\n'
    )
