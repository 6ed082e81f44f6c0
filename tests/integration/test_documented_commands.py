"""Every command of the README and of the pages works as it is written, up to the moment at which a run would start."""

import itertools
import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

from tests.support.clinic import change, diagnosed_words, make_shape
from tests.support.pictures import make_picture, make_tiny_idefics
from tests.support.tiny import make_tiny_model
from tests.support.tool_calls import TOOL_TEMPLATE
from trueline import api
from trueline.cli import main
from trueline.config.run import RunConfig
from trueline.demo.material import make_tokenizer
from trueline.doctor.table import Findings
from trueline.plan import inputs
from trueline.plan import offline as offline_plan
from trueline.plan import sampling as sampling_plan
from trueline.runtime.cluster import Machine
from trueline.verbs import VERBS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "data": lambda number: {"answer": str(number + 1), "solution": str(number + 1), "demonstration": str(number + 1)},
    "prompts chat": lambda number: {"answer": str(number + 1)},
    "code": lambda number: {"prompt": f"print({number})", "answer": str(number)},
    "held_out test": lambda number: {"prompt": f"{number}+2=", "answer": str(number + 2)},
    "pairs": lambda number: {"chosen": str(number + 1), "rejected": "no"},
    "rated": lambda number: {"completion": str(number + 1), "label": number > 0},
    "steps": lambda number: {"completions": ["one more", str(number + 1)], "labels": [True, False]},
    "pictures": lambda number: {"completion": str(number + 1), "image": "cat.png"},
    "picture_prompts": lambda number: {"prompt": f"{number}: " * 16, "answer": str(number), "image": "cat.png"},
    "picture_pairs": lambda number: {"chosen": str(number + 1), "rejected": "no", "image": "cat.png"},
    "talk": lambda number: {"messages": [dict(zip(("role", "content"), turn, strict=True)) for turn in talk(number)]},
}
COUNT = 800  # rows
TESTED = {  # how a command begins that is not `trueline` -> the test that runs it, or the file that does
    "make demo": "tests/integration/test_demo.py",
    "make test": ".ci/run",
    "bash examples/tools/run.sh": "tests/integration/test_agents.py",
    "bash examples/environment/run.sh": "tests/integration/test_agents.py",
    "bash examples/pictures/run.sh": "tests/integration/test_picture_example.py",
    "bash examples/rlhf/run.sh": "tests/integration/test_rlhf_example.py",
    "export RAY_AUTH_MODE=token": "tests/integration/test_tutorials.py",
    "(umask 077 && ": "tests/integration/test_tutorials.py",
    "ray start --": "tests/integration/test_tutorials.py",
    "RAY_ADDRESS=127.0.0.1:6399 trueline": "tests/integration/test_tutorials.py",
    "python -m pytest ": "Makefile",
    "python -m trueline.rewards.replay": "tests/integration/test_reward_faults.py",
    "export TRUELINE_REWARD_TOKEN": "tests/integration/test_serve_reward.py",
    "source <(trueline --print-completion": "tests/unit/test_completion.py",
}
LEFT = (
    "git clone REPOSITORY",
    ". .venv/bin/activate",
    "python -m pdb ",
)  # has no address, tests nothing, waits for a person
OTHER_FILES = ("items:", "task:")  # how YAML begins that is no configuration: a rubric, a task of lm-evaluation-harness
MARK = "Not run by the tests"  # the paragraph before other commands begins so, and says why
MINE = """
def above_median(samples, config): ...
def squared(logprobs, batch, config): ...
def reward(reply, label): return float(reply == label)
def close(reply, label): return 1 / (1 + len(reply) * len(label))
"""


def talk(number: int) -> list[tuple[str, str]]:
    return [("user", f"{number}+1="), ("assistant", str(number + 1))]


def shell_blocks() -> Iterator[tuple[Path, str, list[str]]]:
    """Yield each block of commands, with its page and the paragraph before it; a continued line is one."""
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            before = text[: found.start()].strip().rpartition("\n\n")[2]
            yield page, before, found[1].replace("\\\n", " ").splitlines()


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield each command once, and the page that it is on."""
    seen = set()
    for page, _, lines in shell_blocks():
        for line in lines:
            words = shlex.split(line, comments=True)
            if words[:1] == ["trueline"] and tuple(words) not in seen:
                seen.add(tuple(words))
                yield page.name, words[1:]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the pages name: models, data, files, and runs that ended."""
    folder, tokenizer = tmp_path_factory.mktemp("home"), make_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    for name in ("model", "teacher", "Qwen/Qwen3-0.6B"):
        make_tiny_model(folder / name, tied=True)
        change(folder / name / "config.json", max_position_embeddings=4096)
        tokenizer.save_pretrained(folder / name)
    make_tiny_idefics(folder / "vlm", head_dim=32)  # the smallest for vLLM
    make_picture(0).save(folder / "cat.png")
    scoring = AutoConfig.from_pretrained(folder / "model", num_labels=1)
    LlamaForSequenceClassification(scoring).save_pretrained(folder / "reward_model")
    change(folder / "reward_model/config.json", reward_mean=0.5, reward_std=1.0)
    tokenizer.save_pretrained(folder / "reward_model")
    (folder / "models").mkdir()
    (folder / "models/style").symlink_to(folder / "reward_model")
    (folder / "rewards.py").write_text("def brief(reply): return -len(reply)\n")
    for names, row in ROWS.items():
        for name in names.split():
            rows = [{"prompt": f"{number}+1="} | row(number) for number in range(COUNT)]
            rows = [{key: one[key] for key in one if key != "prompt" or "messages" not in one} for one in rows]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "mine.py").write_text(MINE)
    (folder / "base.yaml").write_text("steps: 5\n")
    (folder / "mine.yaml").write_text("data: {path: data.jsonl}\nreward: {function: math}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        local = ["runtime=local", "monitoring.tensorboard=false", "steps=1", "--model", "model"]
        small = ["prompts_per_step=1", "algorithm.group_size=2", "rollout.max_new_tokens=4", "--reward", "math"]
        averaged = ["training.ema_decay=0.9", "algorithm.kl.coefficient=0", "training.learning_rate=1e-5"]
        assert main(["grpo", "--data", "data.jsonl", "--name", "first", *local, *small, *averaged]) == 0
        adapted = [*averaged, "model.lora.rank=2"]
        assert main(["grpo", "--data", "data.jsonl", "--name", "adapted", *local, *small, *adapted]) == 0
        for verb, name, data in (("sft", "long", "data"), ("rm", "judge", "pairs")):
            held_out = ["samples_per_step=2", "evaluation.share=0.01", "training.learning_rate=1e-4"]
            assert main([verb, "--data", f"{data}.jsonl", "--name", name, *held_out, *local]) == 0
        assert main(["rm", "--data", "picture_pairs.jsonl", "--name", "seen", *held_out, *local, "model.path=vlm"]) == 0
        jobs = ["--model", "model", "--data", "data.jsonl", "runtime=local", "limit=1", "rollout.max_new_tokens=4"]
        assert main(["generate", "--name", "NAME", "--reward", "math", *jobs]) == 0
        assert main(["generate", "--name", "sampled", "--reward", "rewards.py:brief", "pairs=true", *jobs]) == 0
    shutil.copy(folder / "pairs.jsonl", folder / "runs/sampled/pairs.jsonl")  # a random model's answers give none
    checkpoints = folder / "runs" / "judge" / "checkpoints"
    (checkpoints / "step_000001").rename(checkpoints / "step_000500")
    (folder / "runs/first/checkpoints/step_000001").rename(folder / "runs/first/checkpoints/step_000100")
    make_what_tutorials_leave(folder)
    return folder


def make_what_tutorials_leave(folder: Path) -> None:
    """Put runs and data under the names that tutorials give to theirs."""
    for named, there in (("mine", "first"), ("gsm8k", "first")):
        (folder / "runs" / named).symlink_to(folder / "runs" / there)
    for name in ("laptop", "tools", "circle", "gsm8k"):
        (folder / name).mkdir()
    for name in ("laptop/warm_start", "laptop/grpo", "tools/sft", "circle/sft"):
        (folder / name).symlink_to(folder / "runs/first")
    for name in ("laptop/practice", "tools/practice", "circle/practice"):
        (folder / f"{name}.jsonl").symlink_to(folder / "data.jsonl")
    (folder / "laptop/held_out.jsonl").symlink_to(folder / "held_out.jsonl")
    for name, first in (("train", 0), ("test", COUNT)):
        rows = [{"question": f"{one}+1=", "answer": f"I add.\n#### {one + 1}"} for one in range(first, first + COUNT)]
        (folder / f"gsm8k/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def unasked(words: list[str]) -> list[str]:
    """Leave a server alone that the page has people start: a scorer by its address, a judge by a configuration."""
    files = [word for before, word in itertools.pairwise(words) if before == "--config"]
    texts = [*words, *(Path(file).read_text() for file in files if Path(file).is_file())]
    return [*words, *["reward.probe=false"] * any("http://" in text for text in texts)]


def test_there_are_commands() -> None:
    assert len(list(commands())) > 40


def test_every_other_command_runs_in_a_test_or_is_marked() -> None:
    for page, before, lines in shell_blocks():
        for line in filter(None, (re.sub(r"(^|\s)#.*", "", line) for line in lines)):
            ours = line.startswith("trueline ") or line.startswith((*TESTED, *LEFT))
            assert ours or before.startswith(MARK), f"{page.relative_to(ROOT)}: {line}: no test runs it"
    missing = [file for file in TESTED.values() if not (ROOT / file).is_file()]
    assert not missing


@pytest.mark.slow
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
        words = unasked([word for word in words if word != "--deep"])  # which starts processes
        if words[0] in VERBS and "--dry-run" not in words:
            words = [*words, "--dry-run"]
        if words[0] == "verify":  # other checks have tests of their own
            words = [*words, "--checks", "template", "runtime=local"]
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


@pytest.fixture
def sized(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That folder with models of a size that people train, without their bytes, planned for GPUs that hold them."""
    for name in ("model", "teacher", "Qwen/Qwen3-0.6B"):
        shutil.rmtree(folder := home / name)
        make_shape(folder, hidden=1024, layers=28, words=151936)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = TOOL_TEMPLATE.replace("</s>", tokenizer.eos_token)
        tokenizer.save_pretrained(folder)
    machine = Machine(cpus=64, memory_bytes=2**40, gpus=4, gpu_bytes=80 * 2**30)
    for module in (inputs, offline_plan, sampling_plan):
        monkeypatch.setattr(module, "machine_at_hand", lambda: machine)
    for name in ("TRUELINE_REWARD_TOKEN", "JUDGE_KEY"):
        monkeypatch.setenv(name, "a token")
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return home


def proposed(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield what pages and examples have people run: commands, configurations, and parts of them."""
    yield from commands()
    yield from ((file.name, [file.stem, "--config", f"examples/{file.name}"]) for file in EXAMPLES)
    for page in PAGES:
        blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        ours = (block for block in blocks if not block.startswith(OTHER_FILES))
        for number, block in enumerate(ours):
            (folder / f"{page.stem}-{number}.yaml").write_text(block)
            keys = ["--model", "model", "--data", "data.jsonl", "--config", f"{page.stem}-{number}.yaml"]
            yield page.name, ["grpo", *keys]


@pytest.mark.slow
def test_nothing_that_is_proposed_is_warned_of(sized: Path) -> None:
    """Neither by the plan nor by the doctor; what is said of the machine is not about an example."""
    numbers, found = itertools.count(), []
    for page, words in proposed(sized):
        words = unasked([word for word in words if word not in ("doctor", "--deep", "--dry-run")])
        if not words or words[0] not in VERBS:
            continue
        named = [] if "--resume" in words else ["--name", f"unused-{next(numbers)}"]
        said = diagnosed_words([*words, *named])
        worse = [one for family in said if family != "machine" for one in said[family] if one.level != "fine"]
        found += [f"{page}: trueline {shlex.join(words)}: {one.level}: {one.what}; {one.why}" for one in worse]
    sys.modules.pop("mine", None)
    assert not found, "\n".join(found)


def test_the_python_of_the_readme_is_not_warned_of(sized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only call is examined in place of its start."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "trueline.train(" in block]
    found: list[Findings] = []

    def look(verb: str, config: RunConfig, **how: bool) -> int:
        found.append(api.examine(verb, config))
        return 0

    monkeypatch.setattr(api, "start", look)
    (sized / "readme.py").write_text(block.replace("run.plot()", ""))
    runpy.run_path(str(sized / "readme.py"), run_name="__main__")
    (said,) = found
    worse = [one for family in said if family != "machine" for one in said[family] if one.level != "fine"]
    assert not worse, worse
