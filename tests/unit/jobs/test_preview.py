"""Prompts as `trueline data preview` shows them for verbs that sample."""

import json
from pathlib import Path

import pytest

from tests.support.pictures import make_picture, make_tiny_idefics
from tests.support.tiny import make_tiny_model
from trueline.cli import main
from trueline.config.algorithm import PRESETS

Screen = pytest.CaptureFixture[str]
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preview")
    make_tiny_model(folder / "model", tied=True)
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1), "unit": "kg"} for number in range(5)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "talk.jinja").write_text(TEMPLATE)
    return folder


def preview(home: Path, screen: Screen, *words: str) -> list[str]:
    files = ["--model", str(home / "model"), "--data", str(home / "sums.jsonl")]
    template = [f"data.chat_template={home}/talk.jinja", "data.system_prompt=Add"]
    assert main(["data", "preview", *words, *files, *template]) == 0, screen.readouterr().err
    return screen.readouterr().out.splitlines()


@pytest.mark.parametrize("verb", [*PRESETS, "generate", "eval", "raft", "iterative_dpo"])
def test_prompts_are_shown_as_engines_get_them(home: Path, capsys: Screen, verb: str) -> None:
    shown = preview(home, capsys, verb, "--rows", "2")
    assert shown[0].startswith(f"data       5 prompts of {home}/sums.jsonl, longest ")
    texts = [line for line in shown if line.startswith("<")]
    assert texts == ["<system>Add<user>0+1=<assistant>", "<system>Add<user>1+1=<assistant>"]
    assert shown[4:7] == ['  label    "1"', '  answer   "1"', '  unit     "kg"']
    assert preview(home, capsys, "--rows", "2", "--task", verb) == shown == preview(home, capsys, f"--task={verb}")[:-6]


@pytest.mark.parametrize("verb", ["grpo", "sft"])
def test_pictures_are_shown_by_their_sizes_and_tokens(tmp_path: Path, capsys: Screen, verb: str) -> None:
    model, rows = make_tiny_idefics(tmp_path / "model"), []
    for number, images in enumerate([["a.png", "b.png"], []]):
        parts = [*[{"type": "image"}] * len(images), {"type": "text", "text": f"which of {number}?"}]
        rows.append({"prompt": [{"role": "user", "content": parts}], "images": images, "completion": "b"})
    make_picture(1, 60, 20).save(tmp_path / "a.png")
    make_picture(2, 60, 64).save(tmp_path / "b.png")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", "preview", verb, "--model", str(model), "--data", f"{tmp_path}/rows.jsonl"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  pictures"))
    # Of four tokens for a tile and for the whole, and their marks: 2 x 1 tiles, and 2 x 2.
    assert line == "  pictures 60 x 20 (21 tokens), 60 x 64 (34 tokens)"


def test_arguments_of_the_template_are_seen(home: Path, capsys: Screen) -> None:
    (home / "talk.jinja").write_text("{{ greeting }}" + TEMPLATE)
    shown = preview(home, capsys, "grpo", "data.chat_template_kwargs={greeting: hi}")
    (home / "talk.jinja").write_text(TEMPLATE)
    assert "hi<system>Add<user>0+1=<assistant>" in shown


def test_tools_limits_and_rewards_are_seen(home: Path, capsys: Screen) -> None:
    shown = preview(home, capsys, "grpo", "--tools", "python", "rollout.max_prompt_tokens=3")
    assert "<tool>python<system>Add<user>0+1=<assistant>" in shown
    assert ", more than rollout.max_prompt_tokens=3" in shown[2]
    files = ["--model", str(home / "model"), "--data", str(home / "sums.jsonl"), "--reward", "mth"]
    assert main(["data", "preview", "grpo", *files]) == 2
    assert "reward.function=mth: not a built-in" in capsys.readouterr().err
