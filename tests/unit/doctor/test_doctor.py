"""Broken set-ups are named with the key to change; sound ones are left in peace.

Covers `trueline.doctor.case`, `trueline.doctor.data`, `trueline.doctor.template`.
"""

import py_compile
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.support.clinic import diagnosed, make_clinic
from tests.support.pictures import make_picture, make_tiny_qwen, png
from tests.support.tiny import make_tiny_model
from trueline.cli import main
from trueline.config.model import ModelConfig
from trueline.config.rl import RLConfig
from trueline.config.supervised import SftConfig
from trueline.data.pictures import Picture
from trueline.doctor import training
from trueline.doctor.case import Case, DataRow
from trueline.doctor.data import picture_tokens
from trueline.doctor.training import short_completions
from trueline.models.loading import load_chat
from trueline.monitoring.findings import FAILING, Finding
from trueline.plan import rewards

MODEL, CHAT, SUMS = "--model model", "--model chat", "--data sums.jsonl"
GRPO = f"grpo {CHAT} training.learning_rate=1e-3"
MATH = f"{GRPO} --reward math"
MINE = f"{GRPO} {SUMS} --reward mine.py"
SFT = "sft --model chat training.learning_rate=1e-3 samples_per_step=8"

ROWS = f"""
# data
repeated rows: {MATH} --data repeated.jsonl | repeated_rows | data.path watch
repeated rows of sft: {SFT} --data repeated.jsonl | repeated_rows | data.path watch
a leak: {MATH} {SUMS} --eval-data leaked.jsonl | leaked_rows | evaluation.data bad
a leak in a split: {SFT} --data repeated.jsonl evaluation.share=0.5 | leaked_rows | evaluation.by bad
labels that contradict: {MATH} --data contrary.jsonl | contradictions | data.path watch
an empty label: {MATH} --data unlabelled.jsonl | empty_labels | data.label_column bad
prompts with a space: grpo {MODEL} --reward math --data spaced.jsonl | trailing_space | data.prompt_column watch
labels all alike: {MATH} --data alike.jsonl | equal_labels | data.label_column watch
labels of two types: {MATH} --data mixed.jsonl | mixed_labels | data.label_column watch
answers in the prompt: {GRPO} --data told.jsonl --reward exact | leaked_labels | data.prompt_column watch
no such file: {MATH} --data nowhere.jsonl | no such file | data.path refused
other columns: {MATH} --data frage.jsonl | one of frage, antwort | data.prompt_column refused
# rewards
a reward that raises: {MINE}:raises | KeyError: 'I do not know.' (mine.py | reward.function refused
a constant reward: {MINE}:constant | constant_reward | reward.function bad
a blind reward: {MINE}:blind | constant_reward | reward.function watch
a reward upside down: {MINE}:inverted | ignored_label | reward.function bad
a label that is a number: {GRPO} --data numbers.jsonl --reward mine.py:equal | label_type | data.label_column bad
a reward that hangs: {MINE}:hangs reward.timeout_seconds=1 | reward_trial | reward.function bad
a form nobody asks for: {MINE}:tagged | reward_form | reward.function watch
one constant of two: {GRPO} {SUMS} reward.parts.a.function=exact reward.parts.b.function=mine.py:constant \
    | constant_reward | reward.parts.b.function bad
# chat template
turns without an end: {MATH} {SUMS} --model endless | template_without_stop | data.chat_template bad
no generation prompt: {MATH} {SUMS} --model unopened | no_generation_prompt | data.chat_template bad
turns rewritten: {MATH} {SUMS} --model forgetful | template_rewrites_turns | data.chat_template watch
padding that ends: {MATH} {SUMS} --model padded | pad_token | model.path watch
ends that disagree: {MATH} {SUMS} --model disagreeing | end_tokens | model.path watch
two first tokens: {MATH} {SUMS} --model twice | doubled_bos | data.chat_template bad
a first token of the data: {MATH} --data rendered.jsonl --model starting data.chat_template=never \
    | doubled_bos | data.chat_template bad
a first token twice elsewhere: {MATH} {SUMS} --model starting | doubled_bos | data.chat_template watch
rows already rendered: {MATH} --data rendered.jsonl | rendered_rows | data.chat_template bad
tokens without embeddings: {MATH} {SUMS} --model wide | vocabulary | model.path bad
# training
minibatches that do not divide: {MATH} {SUMS} minibatches=7 \
    | set minibatches=4 or prompts_per_step=21 | minibatches refused
groups of one: {MATH} {SUMS} algorithm.group_size=1 | 2 or more (got 1) | algorithm.group_size refused
uneven ranks: {MATH} {SUMS} runtime=ray training.ranks=3 | uneven_ranks | prompts_per_step watch
ranks without work: {MATH} {SUMS} runtime=ray training.ranks=2 prompts_per_step=3 algorithm.group_size=2 minibatches=6 \
    | uneven_ranks | prompts_per_step bad
hundreds of epochs: {MATH} {SUMS} steps=1000 | many_epochs | steps watch
fewer rows than a step: {MATH} {SUMS} prompts_per_step=128 | few_prompts | prompts_per_step watch
a rate that diverges: {MATH} {SUMS} training.learning_rate=1 | learning_rate | training.learning_rate bad
a rate of zero: {MATH} {SUMS} training.learning_rate=0 | greater than 0 | training.learning_rate refused
a rate too small: dpo {CHAT} --data pairs.jsonl training.learning_rate=1e-6 \
    | learning_rate | training.learning_rate watch
endless warm-up: {MATH} {SUMS} training.warmup_steps=100 | endless_warmup | training.warmup_steps bad
a cold policy: {MATH} {SUMS} rollout.temperature=0.1 | temperature | rollout.temperature watch
answers cut off: {GRPO} --data wordy.jsonl --reward exact rollout.max_new_tokens=4 \
    | short_completions | rollout.max_new_tokens bad
rows cut off: {SFT} --data wordy.jsonl max_tokens=16 data.too_long=truncate | long_rows | max_tokens bad
an idle key: {MATH} {SUMS} critic.learning_rate=1 | idle_key | critic.learning_rate watch
# machine
a full disk: {MATH} {SUMS} --model huge | disk | checkpoint.keep bad
a name that is taken: {MATH} {SUMS} --name taken | runs/taken exists | name refused
"""
BROKEN = {  # name -> command, code or words of the finding, its key and level
    name: [part.strip() for part in row.split("|")]
    for name, row in (line.split(": ", 1) for line in ROWS.strip().splitlines() if not line.startswith("#"))
}
SOUND = {
    "a space inside a chat turn": f"{MATH} --data spaced.jsonl",
    "grpo without a template": f"grpo {MODEL} {SUMS} --reward math",
    "grpo": f"{MATH} {SUMS} --eval-data held_out.jsonl",
    "smol": f"grpo --model smol {SUMS} --reward exact model.lora.rank=8 rollout.max_new_tokens=64",
    "ppo": f"ppo {CHAT} {SUMS} --reward mine.py:right",
    "dpo": f"dpo {CHAT} --data pairs.jsonl",
    "sft": f"{SFT} {SUMS}",
    "kto": f"kto {CHAT} --data rated.jsonl",
    "lora": f"{SFT} {SUMS} model.lora.rank=4",
    "tools": f"grpo --model tools {SUMS} --reward math --tools python",
    "a game whose labels differ": f"grpo {CHAT} --data contrary.jsonl --environment game.py:Game",
    "no labels": f"{GRPO} --data bare.jsonl --reward mine.py:letters",
    "numbers": f"{GRPO} --data numbers.jsonl --reward mine.py:right",
    "eval": f"eval {CHAT} --eval-data sums.jsonl --reward math",
    "raft": f"raft {CHAT} {SUMS} --reward math",
}


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clinic(tmp_path_factory.mktemp("clinic"))


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(clinic: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(clinic)
    command, named, key_and_level = BROKEN[name]
    found = diagnosed(command)
    fits = [one for one in found if one.code == named or named in one.what]
    assert key_and_level in [f"{one.key} {one.level}" for one in fits], told(found)


@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_is_left_in_peace(clinic: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(clinic)
    found = diagnosed(SOUND[name])
    assert not [one for one in found if one.level in FAILING], told(found)


def told(found: list[Finding]) -> str:
    return "\n".join(map(str, found))


def test_what_could_not_be_read_is_said(clinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clinic)
    unread = [one.what for one in diagnosed(BROKEN["no such file"][0]) if one.code == "unread"]
    assert len(unread) == 2 and all("rows could not be read" in said for said in unread)
    unread = [one.what for one in diagnosed(f"grpo --model nowhere {SUMS} --reward math") if one.code == "unread"]
    assert [said.split()[-5] for said in unread] == ["tokenizer", "model", "model"]


@pytest.mark.parametrize(("data", "reward"), [("bare", "digits"), ("wordy", "phrased")])
def test_a_reward_is_not_constant_that_praises_digits_or_what_the_data_says(
    clinic: Path, monkeypatch: pytest.MonkeyPatch, data: str, reward: str
) -> None:
    monkeypatch.chdir(clinic)
    found = diagnosed(f"{GRPO} --data {data}.jsonl --reward mine.py:{reward}")
    assert not [one.what for one in found if one.key == "reward.function" and one.level != "fine"]


def test_a_reward_of_turns_is_not_judged_by_replies_without_an_episode(
    clinic: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(clinic)
    assert not [one for one in diagnosed(f"{MINE}:called") if one.code == "constant_reward"]
    assert [one for one in diagnosed(f"{MINE}:blind") if one.code == "constant_reward"]


def test_a_slow_reward_is_told_without_a_level(clinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clinic)
    monkeypatch.setattr(rewards, "PATIENCE_SECONDS", 0.1)  # below what the reward sleeps, however busy the machine is
    found = [
        one for one in diagnosed(f"{GRPO} --data bare.jsonl --reward mine.py:slow") if one.key == "reward.function"
    ]
    assert [(one.level, "was not called again" in one.what) for one in found] == [("fine", True)]
    assert found[0].why == "reward.timeout_seconds=30"


def test_a_label_that_a_reward_understands_is_not_warned_of(clinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clinic)
    found = [one for one in diagnosed(SOUND["numbers"]) if one.key == "reward.function"]
    assert [(one.level, "accepts its own label" in one.what) for one in found] == [("fine", True)]


def test_versions_and_conflicts(clinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clinic)
    monkeypatch.syspath_prepend(str(clinic / "packages"))
    found = {one.what for one in diagnosed(f"{SFT} {SUMS}") if one.level == "watch"}
    asked = next(one for one in map(Requirement, metadata.requires("trueline") or []) if one.name == "vllm")
    assert f"vllm 0.1.0 is outside {asked.specifier}" in found
    assert "pynvml and nvidia-ml-py are both installed" in found


def test_a_library_that_every_process_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (library := tmp_path / "large_library.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(training, "LARGE", ("large_library", "no_such_library"))
    found = []
    for keeps_none, compiles in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(sys, "dont_write_bytecode", keeps_none)
        if compiles:
            py_compile.compile(str(library))
        found.append([one.why for one in training.bytecode(Case(RLConfig(), None, None, [], []))])
    assert found == [[], [f"run python -m compileall -q {tmp_path}"], []]


def test_the_command_prints_a_table_and_starts_nothing(
    clinic: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(clinic)
    monkeypatch.setenv("COLUMNS", "200")
    before = sorted(clinic.rglob("*"))
    assert main(["doctor", *f"{SFT} {SUMS} runtime=local".split()]) == 0
    shown = capsys.readouterr().out
    assert all(family in shown for family in ("plan", "data", "chat template", "rewards", "training", "machine"))
    assert "0 refused, 0 bad" in shown
    assert main(["doctor", *f"{MATH} {SUMS} minibatches=7".split()]) == 1
    assert "prompts_per_step=21" in capsys.readouterr().out
    assert sorted(path for path in clinic.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "grop"], ["grpo", "--deep"]])
def test_what_is_no_run_is_refused_at_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert words != ["doctor", "grop"] or "did you mean 'grpo'?" in capsys.readouterr().err


@pytest.mark.parametrize(("long", "levels"), [(1, []), (2, ["watch"]), (10, ["watch"]), (11, ["bad"])])
def test_labels_longer_than_an_answer_are_told_of_from_a_twentieth_on(long: int, levels: list[str]) -> None:
    """Of 20 labels so many have five tokens, and an answer may have four."""
    config = RLConfig.parse({"rollout": {"max_new_tokens": 4}})
    chat: Any = SimpleNamespace(text_tokens=list)
    rows = [DataRow([], (), "", label="x" * (5 if row < long else 4)) for row in range(20)]
    found = list(short_completions(Case(config, None, chat, rows, [])))
    assert [one.level for one in found] == levels
    assert all(f"{long} of 20 labels checked" in one.what for one in found)


@pytest.mark.parametrize(("most", "full"), [(64, False), (16, True)])
def test_what_pictures_take_of_the_context_is_told(most: int, full: bool, tmp_path: Path) -> None:
    """A picture of 64 x 64 pixels has 16 tokens, one of 32 x 32 has four; the last row has no picture."""
    chat = load_chat(ModelConfig(path=str(make_tiny_qwen(tmp_path))), "auto")
    shown = [Picture(png(make_picture(size, size, size)), size, size) for size in (64, 32)]
    rows = [DataRow([], (), f"row {at}", pictures=some) for at, some in enumerate(((shown[1],), tuple(shown), ()))]
    tokens, *rest = picture_tokens(Case(SftConfig.parse({"max_tokens": most}), None, chat, rows, []))
    assert (tokens.level, tokens.what) == ("fine", "pictures have 4 to 16 tokens each (3 checked)")
    words = f"pictures take more than 50% of max_tokens={most} in 1 of 2 rows checked (50 %), e.g. row 1"
    assert [(one.level, one.code, one.what) for one in rest] == [("watch", "picture_context", words)] * full
    blind = load_chat(ModelConfig(path=str(make_tiny_model(tmp_path / "text", tied=True))), "auto")
    assert not list(picture_tokens(Case(SftConfig(), None, blind, rows, [])))
