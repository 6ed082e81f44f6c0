"""Every command of the README and of the pages works as it is written, up to the moment at which a run would start."""

import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaForSequenceClassification

from tests.support.tiny import make_tiny_model
from trueline.cli import main
from trueline.demo.material import make_tokenizer
from trueline.verbs import VERBS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TALK = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
ROWS = {
    "data prompts held_out test chat code": {"answer": "2"},
    "pairs": {"chosen": "2", "rejected": "3"},
    "rated": {"completion": "2", "label": True},
    "steps": {"completions": ["one more", "2"], "labels": [True, False]},
    "talk": {"messages": TALK},
}
MINE = """
def above_median(samples, config): ...
def squared(logprobs, batch, config): ...
def reward(reply, label): return float(reply == label)
"""


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield each command once, and the page that it is on."""
    seen = set()
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["trueline"] and tuple(words) not in seen:
                    seen.add(tuple(words))
                    yield page.name, words[1:]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the pages name: models, data, files, and runs that ended."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("model", "teacher", "Qwen/Qwen3-0.6B"):
        make_tiny_model(folder / name, tied=True)
        config = folder / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096}))
    scoring = AutoConfig.from_pretrained(folder / "model", num_labels=1, reward_mean=0.5, reward_std=1.0)
    LlamaForSequenceClassification(scoring).save_pretrained(folder / "reward_model")
    make_tokenizer().save_pretrained(folder / "reward_model")
    for names, row in ROWS.items():
        for name in names.split():
            rows = [row | ({} if "messages" in row else {"prompt": f"{number}+1="}) for number in range(20)]
            rows[0] |= {"label": False} if name == "rated" else {}
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "mine.py").write_text(MINE)
    (folder / "base.yaml").write_text("steps: 5\n")
    (folder / "mine.yaml").write_text("data: {path: data.jsonl}\nreward: {function: math}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        local = ["runtime=local", "monitoring.tensorboard=false", "steps=1", "--model", "model"]
        small = ["prompts_per_step=1", "algorithm.group_size=2", "rollout.max_new_tokens=4", "--reward", "math"]
        averaged = ["training.ema_decay=0.9", "algorithm.kl.coefficient=0"]
        assert main(["grpo", "--data", "data.jsonl", "--name", "first", *local, *small, *averaged]) == 0
        adapted = [*averaged, "model.lora.rank=2"]
        assert main(["grpo", "--data", "data.jsonl", "--name", "adapted", *local, *small, *adapted]) == 0
        for verb, name, data in (("sft", "long", "data"), ("rm", "judge", "pairs")):
            held_out = ["samples_per_step=2", "evaluation.share=0.2"]
            assert main([verb, "--data", f"{data}.jsonl", "--name", name, *held_out, *local]) == 0
        jobs = ["--model", "model", "--data", "data.jsonl", "runtime=local", "limit=1", "rollout.max_new_tokens=4"]
        for name in ("NAME", "sampled"):
            assert main(["generate", "--name", name, "--reward", "math", *jobs]) == 0
    checkpoints = folder / "runs" / "judge" / "checkpoints"
    (checkpoints / "step_000001").rename(checkpoints / "step_000500")
    (folder / "runs/first/checkpoints/step_000001").rename(folder / "runs/first/checkpoints/step_000100")
    return folder


def test_there_are_commands() -> None:
    assert len(list(commands())) > 40


def test_every_command_works_up_to_its_start(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setenv("TRUELINE_REWARD_TOKEN", "a token")
    failed, numbers = [], itertools.count()
    for page, words in commands():
        if words[0] in ("serve-reward", "watch", "demo"):
            continue  # they have tests of their own
        words = [word for word in words if word != "--deep"]  # which starts processes
        if words[0] in VERBS and "--dry-run" not in words:
            words = [*words, "--dry-run"]
        if words[0] == "export":
            words[1] = words[1].replace("first", "adapted" if "--merge" in words else "first")
            words = [words[0], words[1], f"exported-{next(numbers)}", *words[3:]]
        status = main(words)
        screen = capsys.readouterr()
        said = (screen.out if words[0] == "doctor" else screen.err).strip()
        if status:
            failed.append(f"{page}: trueline {shlex.join(words)}: {said}")
    sys.modules.pop("mine", None)
    assert not failed, "\n".join(failed)
