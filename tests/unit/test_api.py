"""Runs from Python: arguments as the command line's, functions and rows as files, and what comes back."""

import asyncio
import inspect
import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from torch import Tensor

import trueline
from tests.support.tiny import make_tiny_model
from trueline.algorithms.entries import entry
from trueline.api import quiet_libraries, unknown_verb
from trueline.cli import main
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.base import read_tree
from trueline.data.types import Batch, LossOutput, Sample
from trueline.environments.hosted import load_code
from trueline.environments.opening import user_code_of
from trueline.objects import Objects
from trueline.usercode.failures import NoSuchFunction
from trueline.usercode.loading import load_function
from trueline.verbs import VERBS

ROWS = [{"prompt": f"{number}:", "answer": str(number)} for number in range(8)]
SMALL = {
    "runtime": "local",
    "prompts_per_step": 4,
    "rollout": {"max_new_tokens": 4},
    "training.learning_rate": 1e-3,
    "monitoring": {"tensorboard": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder, tied=True)
    return folder


@pytest.fixture
def small(model: Path, tmp_path: Path) -> dict[str, Any]:
    return {**SMALL, "model": model, "folder": tmp_path}


def counter(character: str) -> Callable[[str], float]:
    """A closure, which no file can name."""
    return lambda reply: reply.count(character) / 4


def config_of(run: trueline.Run) -> dict[str, Any]:
    return read_tree(run.folder / "config.yaml")


def test_a_closure_rewards_a_run_that_can_be_resumed(small: dict[str, Any], tmp_path: Path) -> None:
    worth = 0.25
    run = trueline.train("grpo", data=ROWS, reward=lambda reply: worth, name="first", steps=1, **small)
    assert (run.folder, run.status) == (tmp_path / "first", 0)
    assert list(run.metrics["step"]) == [0, 1] and run.metrics["reward/mean"].dropna().tolist() == [worth]
    assert run.findings[0].code == "started" and "uniform_groups" in [one.code for one in run.findings]
    assert (run.model / "config.json").is_file() and run.model.parent.name == "step_000001"
    assert {row["prompt"] for row in run.transcripts} <= {row["prompt"] for row in ROWS}

    config = config_of(run)
    function, data = Path(config["reward"]["function"]), Path(config["data"]["path"])
    assert function.parent == data.parent == tmp_path / "objects"
    assert re.fullmatch(r"lambda-\w{12}\.pickle", function.name) and re.fullmatch(r"data-\w{12}\.jsonl", data.name)
    assert stat.S_IMODE(function.parent.stat().st_mode) == 0o700
    assert load_function(str(function), {})("any") == worth
    assert [json.loads(line) for line in data.read_text().splitlines()] == ROWS
    assert config["training"]["learning_rate"] == 1e-3 and config["rollout"]["max_new_tokens"] == 4

    resumed = trueline.train("grpo", folder=tmp_path, name="first", resume=True, steps=2)
    assert resumed.folder == run.folder and list(resumed.metrics["step"]) == [0, 1, 2]
    assert main(["grpo", "--resume", "--name", "first", f"folder={tmp_path}", "steps=3"]) == 0
    assert list(run.metrics["step"]) == [0, 1, 2, 3]


def test_curves_are_drawn_and_written(tmp_path: Path) -> None:
    rows = [{"step": step, "reward/mean": step / 4, "evaluation/reward": 0.5, "loss": 9.0} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = trueline.Run(tmp_path)
    picture = run.plot()
    assert picture._repr_svg_() == (tmp_path / "curves.svg").read_text() and picture.file == tmp_path / "curves.svg"
    assert "reward/mean" in picture.svg and "evaluation/reward" in picture.svg and "loss" not in picture.svg
    assert "loss" in run.plot("loss").svg
    with pytest.raises(trueline.ConfigError, match="no metric 'los'; it has step, reward/mean, evaluation/reward, los"):
        run.plot("los")


def test_several_rewards_by_name_and_a_dataset_as_data(small: dict[str, Any], tmp_path: Path) -> None:
    rewards = {
        "letters": counter("b"),
        "short": {"function": partial(str.count, "aa"), "weight": 0.5},
        "exact": "exact",
    }
    asked = {"reward": rewards, "data": Dataset.from_list(ROWS), "steps": 1}
    with pytest.raises(trueline.ConfigError, match=r"reward\.parts\.short: .*partial"):
        trueline.train("grpo", dry_run=True, **asked, **small)  # str.count has no parameter that a reward is given
    rewards["short"] = {"function": counter("c"), "weight": 0.5}
    run = trueline.train("grpo", dry_run=True, **asked, **small)
    assert run.status == 0 and not run.folder.exists() and run.metrics.empty
    [data] = (tmp_path / "objects").glob("data-*.parquet")
    assert Dataset.from_parquet(str(data), cache_dir=str(tmp_path / "cache")).to_list() == ROWS


def test_what_a_dictionary_of_rewards_means(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("trueline.api.start", lambda verb, config, **how: seen.append((verb, config, how)) or 0)
    monkeypatch.chdir(tmp_path)
    trueline.train("grpo", reward={"function": "math", "processes": 1}, model="m", **{"reward.batch": 3})
    trueline.train("grpo", reward={"judge": counter("a"), "math": "math"}, data={"shuffle": False}, eval_data="e.jsonl")
    trueline.evaluate(model="m", data="held_out.jsonl", reward="exact", dry_run=True)
    trueline.generate({"samples": 2, "data": ROWS}, name="n", data=Path("p.jsonl"))
    one, several, evaluation, sampling = (config for _, config, _ in seen)
    assert (one.reward.function, one.reward.processes, one.reward.batch, one.model.path) == ("math", 1, 3, "m")
    assert list(several.reward.parts) == ["judge", "math"] and several.reward.parts["math"].function == "math"
    assert several.reward.parts["judge"].function.endswith(".pickle") and not several.data.shuffle
    assert several.evaluation.data == "e.jsonl"
    assert (evaluation.evaluation.data, evaluation.reward.function) == ("held_out.jsonl", "exact")
    assert (sampling.samples, sampling.data.path, sampling.name) == (2, "p.jsonl", "n")
    assert [(verb, how["resume"], how["dry_run"]) for verb, _, how in seen[2:]] == [
        ("eval", False, True),
        ("generate", False, False),
    ]


def test_environments_tools_and_agents_become_files_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("trueline.api.start", lambda verb, config, **how: seen.append(config.environment) or 0)

    class Game: ...

    objects = tmp_path / "objects"
    trueline.train("grpo", tools=[counter, "python", "mine.py:draw"], folder=tmp_path)
    trueline.generate(tools=counter, folder=tmp_path)
    trueline.evaluate(environment=Game, folder=tmp_path, **{"environment.max_turns": 2})
    trueline.train("raft", agent=counter("a"), folder=tmp_path)
    trueline.train("grpo", environment={"function": Game, "processes": 1}, folder=tmp_path)
    trueline.generate(tools="python,mine.py:f", folder=tmp_path)
    mixed, single, game, agent, section, named = seen
    assert Path(mixed.tools[0]).parent == objects and mixed.tools[1:] == ["python", "mine.py:draw"]
    assert single.tools == mixed.tools[:1] and load_function(single.tools[0], {})("a")("aa") == 0.5
    assert re.fullmatch(rf"{objects}/Game-\w{{12}}\.pickle", game.function) and game.max_turns == 2
    assert (section.function, section.processes) == (game.function, 1) and inspect.isclass(
        load_function(game.function, {})
    )
    assert agent.agent.endswith(".pickle") and named.tools == ["python", "mine.py:f"]
    code = user_code_of(agent)
    assert code is not None and (code.load, code.specification) == (load_code, [agent.agent])


def test_evaluation_and_samples_come_back(small: dict[str, Any]) -> None:
    jobs = small_job(small)
    evaluated = trueline.evaluate(data=ROWS, reward=counter("a"), **jobs)
    assert evaluated.evaluation["evaluation/failed_share"] == 0 and len(evaluated.transcripts) == len(ROWS)
    sampled = trueline.generate(data=ROWS, samples=2, **jobs)
    assert [len(row["completions"]) for row in sampled.samples] == [2] * len(ROWS)


def test_an_interrupted_run_returns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("trueline.api.start", lambda verb, config, **how: 130)
    assert trueline.train("sft", folder=tmp_path, name="stopped") == trueline.Run(tmp_path / "stopped", 130)


def test_runs_of_the_same_second_get_names_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("trueline.api.default_name", lambda verb: f"{verb}-now")
    monkeypatch.setattr("trueline.api.start", lambda verb, config, **how: (tmp_path / config.name).mkdir() or 0)
    folders = [trueline.train("sft", folder=tmp_path).folder.name for _ in range(3)]
    assert folders == ["sft-now", "sft-now-2", "sft-now-3"]


def test_errors_are_the_command_line_s(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("steps: many")
    cases: list[tuple[list[str], dict[str, Any]]] = [
        (["learning_rate=1e-5"], {"learning_rate": 1e-5}),
        (["training.learning_rte=1"], {"training": {"learning_rte": 1}}),
        (["training.learning_rte=1"], {"training.learning_rte": 1}),
        (["steps=many"], {"steps": "many"}),
        (["--config", "bad.yaml"], {"config": "bad.yaml"}),
        (["--config", "none.yaml"], {"config": Path("none.yaml")}),
        (["--resume"], {"resume": True}),
        (["--restart"], {"restart": True}),
        (["--resume", "--name", "no"], {"resume": True, "name": "no"}),
    ]
    for words, keys in cases:
        assert main(["grpo", *words]) == 2
        with pytest.raises(trueline.ConfigError) as error:
            trueline.train("grpo", reward=counter("a"), **keys)
        assert capsys.readouterr().err == f"error: {error.value}\n"
    assert not (tmp_path / "runs").exists()  # nothing is written for what is refused
    with pytest.raises(trueline.ConfigError, match=r"^unknown verb 'gpro'; did you mean 'grpo'"):
        trueline.train("gpro")
    assert unknown_verb("gpro", VERBS) == "unknown verb 'gpro'; did you mean 'grpo'?"


def test_what_cannot_become_a_file_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(trueline.ConfigError, match=r"reward\.function: <lambda> cannot be sent .*lock.*file\.py"):
        trueline.train("grpo", reward=lambda reply: bool(lock), folder=tmp_path)
    with pytest.raises(trueline.ConfigError, match=r"data\.path: row 2 cannot be written as JSON: .*set"):
        trueline.train("grpo", data=[{"prompt": "a"}, {"prompt": {1}}], folder=tmp_path)


def test_only_the_user_s_own_pickles_are_loaded(tmp_path: Path) -> None:
    objects = Objects(tmp_path / "objects")
    name = objects.with_file_names({"reward": {"function": counter("a")}})["reward"]["function"]
    with pytest.raises(NoSuchFunction, match="there is no file"):
        load_function(name, {})
    before = os.umask(0)
    try:
        objects.write()
    finally:
        os.umask(before)
    assert load_function(name, {})("a") == 0.25
    for mode in (0o620, 0o602):
        os.chmod(name, mode)
        with pytest.raises(NoSuchFunction, match="belong to the user of the run and be writable by nobody else"):
            load_function(name, {})
    os.chmod(name, 0o600)
    if os.getuid() == 0:
        os.chown(name, 12345, -1)
        with pytest.raises(NoSuchFunction, match="belong to the user of the run"):
            load_function(name, {})


def test_a_pickled_function_finds_what_its_process_could_import(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/graders.py").write_text("def length(reply): return len(reply)\n")
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, 'scripts'); import graders\n"
        "from trueline.objects import Objects\n"
        "objects = Objects(Path('objects').resolve())\n"
        "named = objects.with_file_names({'reward': {'function': graders.length}})\n"
        "sys.stdout.write(named['reward']['function']); objects.write()"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", program]
    name = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    paths = list(sys.path)
    try:
        assert load_function(name, {})("four") == 4
    finally:
        sys.path[:] = paths
        sys.modules.pop("graders", None)


def test_a_failed_run_raises_its_error_and_names_its_folder(small: dict[str, Any], tmp_path: Path) -> None:
    def broken(reply: str) -> float:
        if reply:
            raise RuntimeError("no such grade")
        return 0.0  # one that fails at every call is refused before the run has a folder

    with pytest.raises(trueline.RunFailed) as error:
        trueline.train("grpo", data=ROWS, reward=broken, name="fails", steps=1, **small)
    said = str(error.value)
    assert said.startswith("error: ") and "no such grade" in said
    assert said.endswith(f"run folder: {tmp_path / 'fails'}")
    assert error.value.folder == tmp_path / "fails" and error.value.run.findings[-1].level == "refused"
    assert error.value.run == trueline.Run(tmp_path / "fails", 1) and not error.value.run.transcripts


def test_an_advantage_and_a_loss_can_be_functions(small: dict[str, Any], tmp_path: Path) -> None:
    """Closures, of which the run that is resumed knows nothing but their files."""
    (seen := tmp_path / "seen").mkdir()

    def ones(samples: list[Sample], config: AlgorithmConfig) -> None:
        (seen / "advantage").touch()
        for sample in samples:
            sample.advantages = sample.mask * 1.0

    @entry("log-probs alone")
    def likelihood(logprobs: Tensor, batch: Batch, config: AlgorithmConfig) -> LossOutput:
        (seen / "loss").touch()
        return LossOutput(-logprobs * batch.advantages)

    given = {"data": ROWS, "reward": counter("a"), "name": "own", "steps": 1, **small}
    given |= {"algorithm": {"advantage": ones, "group_size": 2}, "algorithm.loss": likelihood}
    own = trueline.train("grpo", **given)
    kept = config_of(own)["algorithm"]
    assert kept["advantage"].startswith(f"{tmp_path}/objects/ones-") and kept["loss"].endswith(".pickle")
    assert "log-probs alone" in (own.folder / "logs" / "run.log").read_text()
    assert {file.name for file in seen.iterdir()} == {"advantage", "loss"}
    for file in seen.iterdir():
        file.unlink()
    trueline.train("grpo", name="own", resume=True, steps=2, folder=str(tmp_path))
    assert {file.name for file in seen.iterdir()} == {"advantage", "loss"}


def test_a_run_works_inside_a_running_event_loop(small: dict[str, Any]) -> None:
    async def cell() -> trueline.Run:
        return trueline.train("grpo", data=ROWS, reward=counter("a"), steps=1, **small)

    assert asyncio.run(cell()).status == 0


def test_the_package_is_cheap_to_import() -> None:
    program = (
        "import sys, trueline\n"
        "assert not {'pydantic', 'yaml', 'torch'} & set(sys.modules)\n"
        "assert set(trueline.__all__) <= set(dir(trueline)) and all(vars(trueline.api) for _ in [trueline.train])\n"
        "assert trueline.ConfigError and trueline.Run and not {'torch', 'datasets', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        trueline.trian  # noqa: B018


def test_threads_leave_a_core_free_even_where_torch_was_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    try:
        quiet_libraries()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_dataset_of_several_splits_gives_its_train(small: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    def part(*rows: str) -> Dataset:
        return Dataset.from_list([{"prompt": row} for row in rows])

    def planned(verb: str, **keys: Any) -> dict[str, Any]:
        trueline.train(verb, reward="exact", dry_run=True, **(small | keys))
        out, err = capsys.readouterr()
        return {"config": yaml.safe_load(out.partition("\nmachine ")[0]), "err": err, "out": out}

    splits = DatasetDict(train=part("a", "b"), test=part("c"))
    files = {"data": {"label_column": "prompt"}}
    done = planned("grpo", data=splits, config=files)
    assert "taken      data.path=DatasetDict: its split train, without test" in done["err"]
    assert "data       2 prompts, " in done["out"] and done["config"]["data"]["path"].endswith(".parquet")
    with pytest.raises(trueline.ConfigError, match=r"data\.path=DatasetDict has the splits x, y and no train"):
        planned("grpo", data=DatasetDict(x=part("a"), y=part("b")), config=files)
    sets = planned(
        "grpo", data=splits["train"], evaluation={"sets": {"one": part("a"), "two": part("b")}}, config=files
    )
    assert sets["config"]["evaluation"]["sets"].keys() == {"one", "two"}
    trueline.evaluate(data=splits, reward="exact", dry_run=True, config=files, **small_job(small))
    assert "evaluation.data=DatasetDict: its split test, without train" in capsys.readouterr().err


def small_job(small: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that jobs without training have."""
    return {key: value for key, value in small.items() if key not in ("prompts_per_step", "training.learning_rate")}


def test_texts_are_prompts_or_plain_text(small: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["1+1=2", "2+2=4"]
    trueline.train("grpo", data=texts, reward=counter("1"), dry_run=True, **small)
    assert "data       2 prompts, 0 held out; longest prompt 5 tokens" in capsys.readouterr().out
    trueline.train("sft", data=texts, dry_run=True, model=small["model"], folder=small["folder"], runtime="local")
    assert "format     text" in capsys.readouterr().out


def test_evaluate_takes_data_by_both_names_but_not_two_of_them(small: dict[str, Any]) -> None:
    job = small_job(small)
    for name in ("data", "eval_data"):
        run = trueline.train("eval", reward="exact", evaluation={"limit": 1}, **{name: ROWS}, **job)
        assert Path(config_of(run)["evaluation"]["data"]).parent.name == "objects"
    with pytest.raises(
        trueline.ConfigError, match=r"data and eval_data are the same key, evaluation\.data: give only one"
    ):
        trueline.evaluate(data="a.jsonl", eval_data="b.jsonl", reward="exact", **job)


def test_a_run_is_the_model_the_data_and_what_is_resumed(small: dict[str, Any], tmp_path: Path) -> None:
    sampled = trueline.generate(data=ROWS[:4], reward=counter("1"), samples=2, name="gen", **small_job(small))
    shared = {"runtime": "local", "monitoring": {"tensorboard": False}, "folder": tmp_path}
    first = trueline.train("sft", model=small["model"], data=sampled, steps=1, name="first", **shared)
    assert config_of(first)["data"]["path"] == str(tmp_path / "gen" / "kept.jsonl")
    second = trueline.train("sft", model=first, data=sampled, steps=1, name="second", **shared)
    assert config_of(second)["model"]["path"] == str(first.model)
    for number, which in enumerate((first, "first", str(first.folder)), 2):
        again = trueline.train("sft", resume=which, steps=number, **({} if which is first else {"folder": tmp_path}))
        assert again.folder == first.folder and list(again.metrics["step"])[-1] == number
