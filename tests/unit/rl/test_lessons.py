"""What a teacher reads, in pieces and in whole runs; its numbers against plain Transformers.

Covers `trueline.rl.lessons`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.support.letters import letters_command, rows_of
from tests.support.tiny import make_tiny_model
from trueline.algorithms.divergences import DIVERGENCES
from trueline.cli import main
from trueline.config.algorithm import TEACHER_TEMPLATE, DistillationConfig
from trueline.data.chat import ChatFormat
from trueline.data.types import NO_TARGET
from trueline.demo.material import make_tokenizer
from trueline.rl.lessons import Lessons, Opening, best_sibling, fill, richer, write_lessons
from trueline.rl.models import Models
from trueline.runtime.actors import Stored
from trueline.training.samples import Fields, SampleBlock, SampleNumbers, StoredSamples, last_rows


def test_paragraphs_without_their_text_are_left_out() -> None:
    texts = {"prompt": "2+3=", "demonstration": "", "feedback": "{prompt} is wrong"}
    assert fill("{prompt}\n\nGood:\n{demonstration}\n\nBad:\n{feedback}\n\nEnd {x}", texts) == (
        "2+3=\n\nBad:\n{prompt} is wrong\n\nEnd {x}"
    )
    assert fill(TEACHER_TEMPLATE, {"prompt": "2+3=", "solution": "5"}) == (
        "2+3=\n\nHere is the solution:\n5\n\nNow reply in your own words."
    )


def test_the_template_takes_the_place_of_the_users_last_message() -> None:
    talk = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user", "tool")]
    talk[3]["content"] = "last"
    found = richer(talk, "{solution} {prompt}", {"solution": "S"})
    assert [message["content"] for message in found] == ["system", "user", "assistant", "S last", "tool"]
    assert talk[3]["content"] == "last"


@pytest.mark.parametrize(
    ("rewards", "at", "least", "best"),
    [
        ([0.0, 1.0, 0.5], 0, 0.5, 1),
        ([0.0, 1.0, 0.5], 1, 0.5, 2),  # never itself
        ([0.0, 1.0, 0.0], 1, 0.5, None),
        ([1.0, 1.0, 1.0], 1, 1.0, 2),
        ([1.0, 1.0, 1.0], 2, 1.0, 0),
        ([0.5, 0.0], 1, 0.6, None),
        ([1.0], 0, 1.0, None),
    ],
)
def test_the_best_other_reply_is_shown(rewards: list[float], at: int, least: float, best: int | None) -> None:
    assert best_sibling(rewards, at, least) == best


PROMPT = [{"role": "user", "content": "2+3="}]


def write(config: dict[str, Any], longest: int = 100, **opening: Any) -> list[str]:
    """What the teachers of two replies, of which the first is right, read; an empty text: nothing."""
    chat = ChatFormat(make_tokenizer(), use_template=False)
    given = {"messages": PROMPT, "tools": [], "text": "", "rewards": [1.0, 0.0], "errors": ["", ""], "first": 4}
    given |= {"transcripts": Stored([{"reply": "five"}, {"reply": "six"}])} | opening
    prompt = chat.begin(PROMPT).tokens
    replies = [chat.text_tokens("five"), chat.text_tokens("six")]
    tokens = [np.array([*prompt, *reply], np.int32) for reply in replies]
    masks = [np.arange(len(one)) >= len(prompt) for one in tokens]
    rows = [SampleNumbers(len(one), 1, 7, 4 + at, 0, 0.0, 0.0, False) for at, one in enumerate(tokens)]
    arrays = Stored({"tokens": np.concatenate(tokens), "mask": np.concatenate(masks)})
    stored = StoredSamples(
        [0, 1], rows, Fields([row.length for row in rows], [SampleBlock(("tokens", "mask"), (0, 1), arrays)])
    )
    settings = DistillationConfig.parse(
        {"template": "{demonstration}{solution}{feedback}\n{prompt}".replace("{feedback}", ""), **config}
    )
    lengths, found = write_lessons(chat, stored, {7: Opening(**given)}, settings, longest)
    ends = np.cumsum(lengths)
    texts = []
    for at, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        whole, mask = found["tokens"][end - length : end], found["mask"][end - length : end]
        assert (whole[mask] == replies[at]).all() if mask.any() else length == 2
        texts.append(chat.raw_text(whole[~mask].tolist()) if mask.any() else "")
    return texts


def test_each_reply_gets_what_its_teacher_may_read() -> None:
    solution = {"context": "solution", "template": "{solution}\n{prompt}"}
    assert write(solution, text="5") == ["5\n2+3=", "5\n2+3="]
    feedback = {"context": "feedback", "template": "{demonstration}|{prompt}"}
    assert write(feedback) == ["", "five|2+3="]  # nothing else is right for the first
    both = {"context": "feedback", "template": "{demonstration}\n\n{feedback}\n\n{prompt}"}
    assert write(both, errors=["", "not a number"]) == ["", "five\n\nnot a number\n\n2+3="]
    assert write(both, rewards=[0.0, 0.0], errors=["", "not a number"]) == ["", "not a number\n\n2+3="]


def test_what_has_no_teacher_is_told() -> None:
    solution = {"context": "solution", "template": "{solution}\n{prompt}"}
    assert write(solution, text="") == ["", ""]
    assert write(solution, text="5", longest=len("5\n2+3=") + 2) != ["", ""]
    assert write(solution, text="5", longest=5) == ["", ""]
    assert write(solution, text="5", messages=[{"role": "user", "content": "2+4="}]) == ["", ""]


def test_arrays_of_longer_and_shorter_sequences_end_with_the_sample() -> None:
    array = np.arange(10).reshape(5, 2)
    assert last_rows(array, 2).tolist() == [[6, 7], [8, 9]]
    assert last_rows(array[:1], 3).tolist() == [[NO_TARGET] * 2, [NO_TARGET] * 2, [0, 1]]


# Whole runs


def run(folder: Path, preset: str, *words: str) -> list[dict[str, Any]]:
    """Two steps of a tiny model; rows name a demonstration and a solution of another length each."""
    command = letters_command(
        folder, preset, "steps=2", "prompts_per_step=4", "algorithm.distillation.rewarded=0", *words
    )
    rows = [
        {"prompt": f"{number}:", "demonstration": "abc" * (1 + number % 5), "solution": "xyz" * (number % 2)}
        | {"teacher": "one" if number % 2 else "two"}
        for number in range(30)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(command) == 0
    return rows_of(folder)[1:]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StoredSamples, Lessons | None]]:
    seen: list[tuple[StoredSamples, Lessons | None]] = []
    score = Models.score

    def spy(self: Models, samples: StoredSamples, lessons: Lessons | None = None, **named: Any) -> None:
        score(self, samples, lessons, **named)
        seen.append((samples, lessons))

    monkeypatch.setattr(Models, "score", spy)
    return seen


def plain(model: Any, tokens: np.ndarray, temperature: float) -> torch.Tensor:
    """Log-probs [T, V] of the token in each place, by plain Transformers; the first place has none."""
    with torch.no_grad():
        scores = (model(torch.from_numpy(tokens).long()[None]).logits[0] / temperature).log_softmax(-1)
    return torch.cat([torch.zeros_like(scores[:1]), scores[:-1]])


TEMPLATES = {name: f"algorithm.distillation.template={{{name}}}\n{{prompt}}" for name in ("demonstration", "solution")}


@pytest.mark.parametrize(
    ("preset", "column", "whole"),
    [("sdft", "demonstration", False), ("opsd", "solution", False), ("sdpo", "demonstration", True)],
)
def test_targets_and_divergence_are_those_of_the_teachers_prompt(
    preset: str, column: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step teacher and policy have the same weights, and differ by what they read alone."""
    seen, size = watch(monkeypatch), ["algorithm.group_size=2"] if preset == "sdpo" else []
    top_k = "algorithm.distillation.top_k=" + ("null" if whole else "6")
    rows = run(tmp_path, preset, TEMPLATES[column], top_k, "rollout.temperature=0.8", *size)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    (samples, lessons), divergences = seen[0], []
    assert lessons is not None
    kind = {"sdft": "reverse", "opsd": "forward", "sdpo": "jsd"}[preset]
    for at, row in enumerate(samples.rows):
        tokens, mask = samples.part("tokens", at), samples.part("mask", at)
        if not row.taught:
            assert (samples.part("target_ids", at) == NO_TARGET).all()
            continue
        read = lessons.samples.part("tokens", at)
        assert len(read) > len(tokens) and (read[-int(mask.sum()) :] == tokens[mask]).all()
        teacher, policy = (plain(model, one, 0.8)[-int(mask.sum()) :] for one in (read, tokens))
        chosen = torch.from_numpy(tokens[mask]).long()[:, None]
        found = torch.from_numpy(samples.part("teacher_logprobs", at)[mask])
        torch.testing.assert_close(found, teacher.gather(-1, chosen)[:, 0], rtol=1e-4, atol=1e-4)
        if not whole:
            ids = teacher.topk(6).indices
            assert (torch.from_numpy(samples.part("target_ids", at)[mask]) == ids).float().mean() > 0.95  # but for ties
            teacher, policy = (
                torch.cat([one.gather(-1, ids), one.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)], -1)
                for one in (teacher, policy)
            )
        divergences.append(DIVERGENCES[kind](teacher, policy))
    assert rows[0]["distill/divergence"] == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-3)
    assert rows[0]["loss"] == pytest.approx(rows[0]["distill/divergence"], rel=1e-4)
    taught = sum(row.taught for row in samples.rows) / len(samples.rows)
    assert rows[0]["distill/taught_share"] == pytest.approx(taught) and taught > 0.2
    assert taught < 1 or preset != "opsd"  # half of the solutions are empty


@pytest.mark.parametrize("teacher", ["frozen", "policy", "average"])
def test_a_teachers_weights_are_the_first_the_latest_or_between(
    teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, words = watch(monkeypatch), ["training.ema_decay=0.5", "training.learning_rate=3e-3"]
    run(tmp_path, "sdft", TEMPLATES["demonstration"], f"algorithm.distillation.teacher={teacher}", *words)
    first = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    (samples, lessons), gap = seen[1], 0.0
    assert lessons is not None
    for at, row in enumerate(samples.rows):
        tokens, mask, read = samples.part("tokens", at), samples.part("mask", at), lessons.samples.part("tokens", at)
        assert row.taught
        before = plain(first, read, 1.0)[-int(mask.sum()) :].gather(-1, torch.from_numpy(tokens[mask]).long()[:, None])
        gap += (torch.from_numpy(samples.part("teacher_logprobs", at)[mask]) - before[:, 0]).abs().sum().item()
    assert (gap < 1e-3) == (teacher == "frozen")


def test_a_mixed_loss_keeps_completions_without_a_teacher(tmp_path: Path) -> None:
    """They learn from their reward; where only a teacher teaches, they are left out of the averages."""
    words = [TEMPLATES["solution"], "algorithm.distillation.coefficient=0.5", "algorithm.distillation.context=solution"]
    row = run(tmp_path, "dr_grpo", *words, "algorithm.distillation.teacher=policy", "algorithm.group_size=4")[0]
    assert 0 < row["distill/taught_share"] < 1 and row["distill/divergence"] > 0
    assert row["loss"] == pytest.approx(0.5 * row["distill/divergence"], rel=0.2)  # beside advantages of mean 0


def test_a_teacher_for_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    paths = {
        name: make_tiny_model(tmp_path / name, tied=True, seed=seed) for seed, name in enumerate(("one", "two"), 5)
    }
    words = [f"teacher.paths.{name}={path}" for name, path in paths.items()]
    run(tmp_path, "on_policy_distill", "algorithm.distillation.coefficient=0.1", *words)
    models = {name: transformers.AutoModelForCausalLM.from_pretrained(path) for name, path in paths.items()}
    samples, lessons = seen[0]
    assert lessons is not None and set(lessons.teachers) == {"one", "two"}
    for at in range(len(samples)):
        tokens, mask = samples.part("tokens", at), samples.part("mask", at)
        expected = plain(models[lessons.teachers[at]], tokens, 1.0)[mask].gather(
            -1, torch.from_numpy(tokens[mask]).long()[:, None]
        )
        found = torch.from_numpy(samples.part("teacher_logprobs", at)[mask])
        torch.testing.assert_close(found, expected[:, 0], rtol=1e-4, atol=1e-4)


def test_transcripts_show_the_teachers_prompt_once_a_step(tmp_path: Path) -> None:
    run(tmp_path, "sdft", TEMPLATES["demonstration"])
    shown = [json.loads(line) for line in (tmp_path / "run" / "transcripts.jsonl").read_text().splitlines()]
    for step in (1, 2):
        prompts = [one["teacher_prompt"] for one in shown if one["step"] == step and "teacher_prompt" in one]
        assert len(prompts) == 1 and prompts[0].startswith("abc") and prompts[0].endswith(":")
    assert all(one["teacher_prompt"].endswith(f"\n{one['prompt']}") for one in shown if "teacher_prompt" in one)
