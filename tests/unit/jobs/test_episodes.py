"""`generate` and `eval` with tools, environments and agents, by the command line and from Python."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import trueline
from tests.support.tiny import make_tiny_model
from tests.support.tool_calls import TOOL_TEMPLATE
from trueline.cli import main
from trueline.config.base import ConfigError
from trueline.config.data import DataConfig
from trueline.config.model import ModelConfig
from trueline.config.sampling import EvalConfig, GenerateConfig, RaftConfig
from trueline.data.encoding import encode_conversations, encode_pairs
from trueline.data.formats import read_conversations, read_pairs
from trueline.data.messages import Message
from trueline.data.sources import open_source
from trueline.data.types import Dialogue, Outcome, Prompt, Trajectory
from trueline.jobs import sampling
from trueline.jobs.rounds import Recipe
from trueline.jobs.sample_file import pair_of, row_of, select_kept, write_selection
from trueline.jobs.sampling import check_unchanged
from trueline.models.loading import load_chat
from trueline.monitoring.run_folder import RunFolder
from trueline.plan.sampling import check_pairs, plan_eval, plan_generate
from trueline.verbs import VERBS

CALL = '{"name": "draw", "arguments": {}}'
TOOL_TALK = ["draw", CALL, "tool: 7", "7"]
GAME_TALK = ["play", "a", "user: more", "b"]
CODE = """
def draw() -> str:
    "Draw a number."
    return "7"


class Game:
    def __init__(self, worth: float = 0.5):
        self.worth, self.turns = worth, 0

    def reset(self, prompt):
        return [{"role": "user", "content": "play"}]  # whatever the row asks

    def step(self, reply):
        self.turns += 1
        if self.turns == 2:
            return {"reward": self.worth, "done": True, "metrics": {"game/turns": self.turns}}
        return {"messages": "more", "reward": 0.25}


def main(prompt, policy):
    asked = [{"role": "user", "content": "play"}]
    said = policy(asked)
    policy([*asked, {"role": "assistant", "content": said}, {"role": "user", "content": "more"}])
    return float(said == "a")
"""


def messages_of(talk: list[str]) -> list[Message]:
    """The user and the assistant take turns, unless a text names who says it."""
    spoken = [text.split(": ", 1) if ": " in text and text[0] != "{" else ["", text] for text in talk]
    return [
        {"role": role or ("assistant" if at % 2 else "user"), "content": text} for at, (role, text) in enumerate(spoken)
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt two conversations by heart, prompts that begin them, and user code."""
    folder = tmp_path_factory.mktemp("home")
    make_tiny_model(folder / "model", tied=True)
    (folder / "model/chat_template.jinja").write_text(TOOL_TEMPLATE)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    schema = [{"type": "function", "function": {"name": "draw"}}]
    talks = [(messages_of(TOOL_TALK), schema), (messages_of(GAME_TALK), None)]
    texts = [tokenizer.apply_chat_template(talk, tools=tools, tokenize=False) for talk, tools in talks]
    rows = tokenizer(texts, return_tensors="pt", padding=True)
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        loss = model(**rows, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.3  # what a prompt asks cannot be known
    model.save_pretrained(folder / "model")
    for name, prompt in (("draws", "draw"), ("plays", "play")):
        lines = [json.dumps({"prompt": prompt, "answer": "7", "row": row}) + "\n" for row in range(3)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "mine.py").write_text(CODE)
    return folder


Run = Callable[..., Path]


@pytest.fixture
def run(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Start a verb by the command line, greedily and in one process."""
    monkeypatch.chdir(home)

    def start(verb: str, *words: str) -> Path:
        data = "--eval-data" if verb == "eval" else "--data"
        greedy = [] if verb == "eval" else ["rollout.top_k=1", "samples=2"]
        kept = ["--model", "model", "--name", verb, f"folder={tmp_path}", "runtime=local", "environment.processes=1"]
        assert main([verb, data, words[0], *words[1:], *kept, *greedy, "rollout.max_new_tokens=80"]) == 0
        return tmp_path / verb

    return start


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_episodes_with_a_tool_are_written_whole_and_sft_learns_their_replies(run: Run, home: Path) -> None:
    folder = run("generate", "draws.jsonl", "--tools", "mine.py:draw", "--reward", "exact", "keep=best")
    row = lines(folder / "samples.jsonl")[0]
    (offered,) = row["tools"]
    assert (offered["function"]["name"], row["prompt"]) == ("draw", messages_of(["draw"]))
    one = row["completions"][0]
    said = messages_of(TOOL_TALK)
    (talk,) = one["conversations"]
    assert talk["prompt"] == said[:1] and talk["tools"] == row["tools"]
    assert [(each["role"], each["content"]) for each in talk["completion"]] == [
        (each["role"], each["content"]) for each in said[1:]
    ]
    assert (one["reply"], one["reward"], one["outcome"], one["parts"]) == ("7", 1.0, "finished", {"reward": 1.0})
    counted = {"episode/turns": 2.0, "episode/sequences": 1.0, "tools/calls": 1.0}
    assert (
        one["metrics"] == {**counted, "tools/mistakes": 0.0, "tools/errors": 0.0}
        and one["tokens"] == len(CALL) + len("7") + 2
    )

    kept = lines(folder / "kept.jsonl")
    assert [each["reward"] for each in kept] == [1.0] * 3
    records, _ = read_conversations(open_source(str(folder / "kept.jsonl"), "data.path"), DataConfig())
    chat = load_chat(ModelConfig(path=str(home / "model")), "auto")
    sample = encode_conversations(records, chat, 256, "all", "error").samples[0]
    assert chat.tokenizer.decode(sample.tokens[sample.mask]) == f"{CALL}</s>7</s>"


def load_settings(home: Path) -> dict[str, Any]:
    return dict(json.loads((home / "model/config.json").read_text()))


def test_eval_reports_what_an_environment_says(run: Run, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run("eval", "draws.jsonl", "--environment", "mine.py:Game", "environment.options={worth: 0.5}")
    metrics = json.loads((folder / "evaluation.json").read_text())["metrics"]
    wanted = {"reward": 0.75, "environment/game/turns": 2.0, "episode/turns": 2.0, "failed_share": 0.0}
    wanted["response_length"] = 4.0
    assert {name: metrics[f"evaluation/{name}"] for name in wanted} == wanted
    shown = capsys.readouterr().out
    assert "reward     from the environment" in shown
    context = load_settings(home)["max_position_embeddings"]
    assert f"turns      up to 8 in sequences of up to {context} tokens: environment.function=mine.py:Game" in shown
    assert "game/turns" in shown and "2.000" in shown and "0.750" in shown
    (talk,) = lines(folder / "transcripts.jsonl")[0]["completions"][0]["conversations"]
    assert [*talk["prompt"], *talk["completion"]] == messages_of(GAME_TALK)  # not the row's prompt, but what was said


def test_engines_know_the_tokenizer_where_user_code_may_ask_for_a_format(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    start = sampling.engine_specs

    def noted(*given: Any, structured: bool = False) -> Any:
        asked.append(structured)
        return start(*given, structured=structured)

    monkeypatch.setattr(sampling, "engine_specs", noted)
    run("eval", "draws.jsonl", "--environment", "mine.py:Game")
    run("generate", "draws.jsonl", "--tools", "mine.py:draw", "--reward", "exact")
    assert asked == [True, False]


def test_a_killed_generate_goes_on_with_its_environment(run: Run, tmp_path: Path) -> None:
    folder = run("generate", "plays.jsonl", "--agent", "mine.py:main", "keep=threshold")
    whole, kept = (folder / "samples.jsonl").read_bytes(), (folder / "kept.jsonl").read_bytes()
    assert kept.count(b"\n") == 6 and b'"reward": 1.0' in kept
    (folder / "samples.jsonl").write_bytes(whole[: whole.index(b"\n") + 100])  # a kill in the second line
    (folder / "kept.jsonl").unlink()
    assert main(["generate", "--resume", "--name", "generate", f"folder={tmp_path}"]) == 0
    again = (folder / "samples.jsonl").read_bytes()
    assert sorted(again.splitlines()) == sorted(whole.splitlines())  # in the order in which they were done
    assert (folder / "kept.jsonl").read_bytes() == kept


def test_another_environment_cannot_go_on_with_what_one_has_sampled(home: Path, tmp_path: Path) -> None:
    tree = {"runtime": "local", "model": {"path": str(home / "model")}, "name": "run", "folder": str(tmp_path)}
    before = GenerateConfig.parse(tree | {"environment": {"function": "mine.py:Game", "options": {"worth": 1.0}}})
    folder = RunFolder(tmp_path / "run").open(before, "generate", resume=False)
    check_unchanged(before.with_keys({"environment": {"processes": 2, "timeout_seconds": 1.0}}), folder)
    changes = {"function": "", "options": {"worth": 2.0}, "tool_format": "json", "max_turns": 3, "max_turn_tokens": 2}
    for key, value in changes.items():
        with pytest.raises(ConfigError, match=rf"^environment\.{key} was .* choose another --name"):
            check_unchanged(before.with_keys({"environment": {key: value}}), folder)
    other = {"agent": "mine.py:main", "tools": ["python"]}
    for key, value in other.items():
        with pytest.raises(ConfigError, match=r"^environment\.(function|agent|tools) was"):
            check_unchanged(before.with_keys({"environment": {"function": "", key: value}}), folder)


# What is selected from episodes


def episode(reward: float, *said: str, began: str = "play", sequences: int = 1) -> Trajectory:
    prompt = Prompt(0, messages_of(["play"]))
    talk = messages_of([began, *said])
    found = Trajectory(prompt, 0, reward=reward, reply=said[-1], dialogues=[Dialogue(talk[:1], talk[1:])])
    found.metrics = {"episode/sequences": float(sequences)}
    return found


def paired(*group: Trajectory) -> list[str] | None:
    row = row_of(0, list(group), scored=True, played=True)
    pair = pair_of(row, GenerateConfig.parse({"pairs": True, "reward": {"function": "exact"}}))
    return [pair[name][0]["content"] for name in ("chosen", "rejected")] if pair else None


def test_pairs_are_of_episodes_that_begin_alike_and_are_one_sequence() -> None:
    best, worst = episode(1.0, "a", "user: more", "same"), episode(0.0, "c", "user: more", "same")
    assert paired(worst, best) == ["a", "c"]  # that last replies agree means nothing
    assert paired(best, episode(0.0, "a", "user: more", "same")) is None
    assert paired(best, episode(0.0, "c", began="other")) is None
    assert paired(best, episode(-1.0, "d", began="other"), worst) == ["a", "c"]
    assert paired(best, episode(0.0, "c", sequences=2)) is None
    assert paired(episode(2.0, "z", sequences=2), best, worst) == ["a", "c"]


def test_dpo_reads_pairs_of_episodes(tmp_path: Path, home: Path) -> None:
    group = [episode(1.0, "a", "user: more", "b"), episode(0.0, "a", "user: more", "c", "user: again", "d")]
    config = GenerateConfig.parse({"pairs": True, "keep": "best", "reward": {"function": "exact"}})
    assert write_selection([row_of(0, group, scored=True, played=True)], tmp_path, config)["pairs"] == 1
    records, _ = read_pairs(open_source(str(tmp_path / "pairs.jsonl"), "data.path"), DataConfig())
    chat = load_chat(ModelConfig(path=str(home / "model")), "auto")
    samples = encode_pairs(records, chat, 256, "error").samples
    assert [chat.tokenizer.decode(one.tokens[one.mask]) for one in samples] == ["a</s>b</s>", "a</s>c</s>d</s>"]
    assert (lines(tmp_path / "pairs.jsonl")[0]["chosen_reward"], len(lines(tmp_path / "kept.jsonl"))) == (1.0, 1)


def test_each_conversation_of_an_episode_is_a_row_and_an_empty_message_bars_it() -> None:
    config = GenerateConfig.parse({"reward": {"function": "exact"}})
    forked = episode(1.0, "a")
    forked.dialogues.append(Dialogue(messages_of(["other"]), messages_of(["other", "b"])[1:]))
    row = row_of(0, [forked, episode(1.0, "", "user: more", "b"), episode(1.0, "a", "user:  ", "b")], scored=True)
    assert len(select_kept(row, config)) == 3  # single replies that say something
    played = row_of(
        0, [forked, episode(1.0, "", "user: more", "b"), episode(1.0, "a", "user:  ", "b")], scored=True, played=True
    )
    (kept,) = select_kept(played, config)
    assert [talk["completion"][0]["content"] for talk in kept["conversations"]] == ["a", "b"]


def test_pairs_are_refused_where_no_trainer_could_read_them(home: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=str(home / "model"))
    check_pairs(load_chat(config, "auto"))
    with pytest.raises(ConfigError, match="no single one, for there is no chat template: set pairs=false"):
        check_pairs(load_chat(config, "never"))
    (tmp_path / "last.jinja").write_text("{% for one in messages[-1:] %}{{ one.content }}</s>{% endfor %}")
    with pytest.raises(ConfigError, match="for the chat template rewrites earlier turns: set pairs=false"):
        check_pairs(load_chat(config, str(tmp_path / "last.jinja")))
    tree = {"runtime": "local", "model": {"path": config.path}, "data": {"path": str(home / "plays.jsonl")}}
    played = {"pairs": True, "environment": {"function": f"{home / 'mine.py'}:Game"}}
    assert plan_generate(GenerateConfig.parse(tree | played)).config.pairs
    tree["data"]["chat_template"] = "never"
    with pytest.raises(ConfigError, match="there is no chat template"):
        plan_generate(GenerateConfig.parse(tree | played))


# Plans and keys


def test_an_environment_is_checked_against_every_set(home: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Game:\n def reset(self, row): ...\n def step(self, reply): ...\n")
    (tmp_path / "other.jsonl").write_text('{"prompt": "play"}\n')
    sets = {"plays": str(home / "plays.jsonl"), "other": str(tmp_path / "other.jsonl")}
    tree = {"runtime": "local", "model": {"path": str(home / "model")}, "evaluation": {"sets": sets}}
    with pytest.raises(ConfigError, match="no value for its parameter 'row'"):
        plan_eval(EvalConfig.parse(tree | {"environment": {"function": f"{tmp_path / 'mine.py'}:Game"}}))
    with pytest.raises(ConfigError, match=r"reward\.function is empty"):  # which tools do not make up for
        plan_eval(EvalConfig.parse(tree | {"environment": {"tools": ["python"]}}))


def test_rounds_hand_the_environment_on(tmp_path: Path) -> None:
    played = {"tools": ["python"], "max_turns": 3}
    keys = {"reward": {"function": "exact"}, "evaluation": {"data": "e.jsonl"}, "environment": played}
    recipe = Recipe(RaftConfig.parse(keys), tmp_path, 1)
    assert recipe.generation(1).environment == recipe.evaluation(0).environment == recipe.config.environment
    for verb in ("generate", "eval", "raft", "iterative_dpo"):
        assert {"--environment", "--tools", "--agent"} <= VERBS[verb].flags.keys()


# From Python


def test_objects_of_python_are_played(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closure as a tool, a class with a helper elsewhere as an environment, and a lambda as an agent."""
    (tmp_path / "worths.py").write_text("def worth(reply): return float(len(reply))")
    monkeypatch.syspath_prepend(tmp_path)
    worths, number = importlib.import_module("worths"), "7"

    def draw() -> str:
        """Draw a number."""
        return number

    class Game:
        def reset(self, prompt: str) -> None: ...

        def step(self, reply: str) -> float:
            return float(worths.worth(reply))

    shared = {"model": home / "model", "folder": tmp_path, "runtime": "local", "rollout": {"max_new_tokens": 80}}
    one = {"environment.processes": 1}
    tools = trueline.evaluate(data=home / "draws.jsonl", reward="exact", tools=[draw], **shared, **one)
    found = tools.evaluation
    assert (found["evaluation/tools/calls"], found["evaluation/reward"]) == (1.0, 1.0)
    sampled = trueline.generate(data=home / "plays.jsonl", environment=Game, samples=1, **shared, **one)
    assert [row["completions"][0]["reward"] for row in sampled.samples] == [float(len("a"))] * 3
    trained = trueline.train(
        "grpo",
        data=home / "plays.jsonl",
        agent=lambda prompt, policy: float(policy([{"role": "user", "content": prompt}]) == "a"),
        steps=1,
        prompts_per_step=1,
        **{"algorithm.group_size": 2, "monitoring.tensorboard": False, "checkpoint.save": False},
        **shared,
        **one,
    )
    assert trained.metrics["reward/mean"].dropna().tolist() == [1.0]
    names = {file.name.partition("-")[0] for file in (tmp_path / "objects").iterdir()}
    assert names == {"draw", "Game", "lambda"}


def test_what_cannot_be_played_is_refused_from_python(tmp_path: Path) -> None:
    with pytest.raises(trueline.ConfigError, match=r"environment\.function.*string"):
        trueline.evaluate(environment=object(), folder=tmp_path)
    stream = (tmp_path / "log").open("w")
    with stream, pytest.raises(trueline.ConfigError, match=r"environment\.agent: <lambda> cannot be sent"):
        trueline.generate(agent=lambda prompt: stream.write(prompt), folder=tmp_path)


def test_a_failed_episode_is_written_with_its_cause() -> None:
    lost = Trajectory(Prompt(0, messages_of(["play"])), 0, outcome=Outcome.ENVIRONMENT_ERROR, error="the board fell")
    (one,) = row_of(0, [lost], scored=True, played=True)["completions"]
    assert (one["conversations"], one["metrics"], one["error"], one["reward"]) == ([], {}, "the board fell", None)
