"""Every script of benchmarks/ runs here at its smallest size; one that needs a GPU or TRL reads its arguments."""

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.tiny import make_tiny_model
from trueline.monitoring import trackers
from trueline.monitoring.events import Events
from trueline.rl import step

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "benchmarks"
HELP = "--help"
DAY_AND_COMMIT = re.compile(r"\b20\d\d-\d\d-\d\d, [0-9a-f]{7}\b")
SMALL = "--engines 3 --episodes 400 --prompts 4 --group-size 2 --tokens 64 --mean-tokens 32"
LEAST = "--shape tiny --samples 4 --longest 96 --tokens 256 --steps 1 --rounds 1"
LOCAL = "runtime=local rollout.engine=hf"
FEW = f"{LOCAL} monitoring.doctor=false rollout.max_new_tokens=4 prompts_per_step=2 evaluation.limit=2"
RUN = "runtime=local rollout.max_new_tokens=4 rollout.max_prompt_tokens=128"


class Try(NamedTuple):
    """Words that a script is given: FOLDER does not exist yet, MODEL is a tiny one, DATA has rows of GSM8K's form."""

    words: str
    apart: bool = False  # in a process of its own, as it starts others; such tests are slow


TABLE: dict[str, list[Try]] = {
    "advantages.py": [Try("--completions 2 --tokens 8 --runs 1")],
    "against_trl.py": [Try(HELP)],  # and Trueline's side below
    "agents.py": [Try("FOLDER --episodes 2 --turns 2 --engine hf", apart=True)],
    "asynchrony.py": [Try("FOLDER --seeds 1 --steps 3 --delay 0 --tokens 8 --modes synchronous", apart=True)],
    "checkpoints.py": [Try("--mebibytes 1 --rounds 1", apart=True)],
    "controller.py": [Try("FOLDER --completions 8 --group 4 --tokens 8192 --steps 2 --ranks 1", apart=True)],
    "deterministic.py": [Try(HELP), Try(f"MODEL FOLDER --steps 2 {FEW}", apart=True)],
    "doctor.py": [Try("--rows 10 --rounds 1", apart=True)],
    "gpu_geometry.py": [Try(HELP), Try(f"FOLDER --shape tiny --steps 1 --rows 64 --least 0 {LOCAL}", apart=True)],
    "gpu_gsm8k.py": [
        Try(HELP),
        *(Try(f"MODEL DATA FOLDER {tool} --steps 2 --every 1 --least -1 {FEW}", apart=True) for tool in ("", "--tool")),
    ],
    "gpu_learning.py": [Try(HELP)],  # and by deterministic.py
    "gpu_memory.py": [Try(HELP), Try(f"FOLDER --shape tiny --steps 1 {RUN}", apart=True)],
    "gpu_pictures.py": [Try(HELP)],  # vLLM needs torchvision for its families
    "gpu_rl.py": [Try(HELP), Try(f"FOLDER --tiny --steps 1 {RUN}", apart=True)],
    "gpu_sft.py": [Try(HELP)],
    "million_prompts.py": [Try("FOLDER --prompts 2000", apart=True)],
    "picture_model.py": [],  # is imported by others
    "random_model.py": [],  # likewise
    "kept_samples.py": [Try("--completions 4 --tokens 8")],
    "recording.py": [Try("FOLDER --requests 10 --steps 1 --prompts 1 --tokens 4")],
    "rl_step.py": [Try("FOLDER --cpu --tokens 4 --steps 3 --completions 2x2 runtime=local")],
    "routing_replay.py": [
        Try("FOLDER --tiny --steps 2 --tokens 4 --completions 2x2 runtime=local"),
        Try("FOLDER --tiny --steps 2 --tokens 4 --completions 2x2", apart=True),
    ],
    "sampling.py": [Try("FOLDER --shape tiny --tokens 8 --completions 1x2 --rounds 2", apart=True)],
    "shared_prefix.py": [Try("--shape tiny --groups 2x4 --prompt 64 --answer 8 --tokens 256 --steps 3", apart=True)],
    "simulate.py": [Try(f"{SMALL} --on-update wait keep"), Try(f"{SMALL} --turns 3 --engine-failures 6 --staleness 1")],
    "tables.py": [Try("--check")],
    "tool_turns.py": [Try("--episodes 4 --turns 3 --seconds 0 --processes 2", apart=True)],
    "train_throughput.py": [Try("--shape tiny --samples 4 --longest 96 --tokens 256 --steps 3", apart=True)],
    "training_engines.py": [
        Try(f"{LEAST} --modes compiled plain checkpointed --offload moments", apart=True),
        Try(f"{LEAST} --modes plain checkpointed --sides bare fsdp2 --stay", apart=True),
    ],
    "trl_grpo.py": [Try(HELP)],
    "trl_side.py": [Try(HELP)],
    "weight_sync.py": [Try("FOLDER --shape tiny --steps 3 runtime=local")],
}


def tried(apart: bool) -> list[Any]:
    return [
        pytest.param(name, one.words, id=f"{name}-{place}")
        for name, tries in TABLE.items()
        for place, one in enumerate(tries)
        if one.apart is apart
    ]


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def in_folder(words: str, folder: Path) -> list[str]:
    if "MODEL" in words.split():
        make_tiny_model(folder / "model", tied=True)
    for name in ("train", "test"):
        rows = [{"question": f"{one} and one?", "answer": f"It is {one} + 1.\n#### {one + 1}"} for one in range(8)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = {"FOLDER": folder / "made", "MODEL": folder / "model", "DATA": folder}
    return [str(places.get(word, word)) for word in words.split()]


def figures() -> list[str]:
    """Return what names a command behind a figure: paragraphs of the page of benchmarks, and rows of the README."""
    paragraphs = (ROOT / "docs" / "benchmarks.md").read_text().split("\n\n")
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]
    commands = ("benchmarks/", "`make ", "-m pytest ")
    return [text for text in (*paragraphs[2:], *rows) if any(word in text for word in commands)]


def test_every_figure_names_a_command_that_is_there_its_day_and_its_commit() -> None:
    found = figures()
    assert len(found) > 15
    assert not [text for text in found if not DAY_AND_COMMIT.search(text)]
    assert {name for text in found for name in re.findall(r"benchmarks/(\w+\.py)", text)} <= TABLE.keys()


def test_every_script_is_in_the_table() -> None:
    assert sorted(file.name for file in SCRIPTS.glob("*.py")) == sorted(TABLE)


@pytest.mark.parametrize(("name", "words"), tried(apart=False))
def test_a_script_runs_in_this_process(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute in ((Events, "add"), (Events, "row"), (step, "token_rows"), (trackers, "compact")):
        monkeypatch.setattr(owner, attribute, vars(owner)[attribute])  # recording.py puts its own in their place
    monkeypatch.setattr(sys, "argv", [name, *in_folder(words, tmp_path)])
    try:
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    except SystemExit as ended:
        assert ended.code in (None, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), tried(apart=True))
def test_a_script_runs_by_itself(name: str, words: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / name), *in_folder(words, tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("task", ["sft", "dpo", "kto", "rm"])
def test_truelines_side_of_the_comparison_with_trl(task: str, tmp_path: Path) -> None:
    """Rows of text become the ids that TRL is given, and each step of both rounds leaves the same finite loss."""
    against_trl = importlib.import_module("against_trl")
    solved = {"solution": "seven", "is_correct": True}
    graded = dict.fromkeys(against_trl.GRADED, solved) | {"6b_finetuning": {"solution": "no", "is_correct": False}}
    for file, row in (("train", {"answer": "seven"}), ("example_model_solutions", graded)):
        rows = [{"question": f"{number} and one?", **row} for number in range(16)]
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_tiny_model(tmp_path / "model", tied=True)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": against_trl.MAX_TOKENS}))
    if task == "rm":
        tokenizer = against_trl.load_tokenizer(against_trl.ModelConfig(path=str(model)))
        model = against_trl.make_classifier(tmp_path / "classifier", model, tokenizer)
    given = against_trl.argparse.Namespace(out=tmp_path, data=tmp_path, steps=2, batch=2)
    job = against_trl.prepare(task, model, given)
    ids = [json.loads(line) for line in job.ids.read_text().splitlines()]
    assert len(ids) == 4 and set(ids[0]) >= {"prompt_ids", *(f"{name}_ids" for name in against_trl.COMPLETIONS[task])}
    first, second = against_trl.run_trueline(job), against_trl.run_trueline(job)
    assert len(first.losses) == 2 and against_trl.largest_gap(first, second) == 0.0
    lengths = [sum(len(values) for key, values in row.items() if key.endswith("_ids")) for row in ids]
    prompts = [len(row["prompt_ids"]) * (len(against_trl.COMPLETIONS[task]) - 1) for row in ids]
    assert sum(first.tokens) == sum(lengths) + sum(prompts)  # each of a pair has the prompt
    assert first.run_seconds > 0


def measured(module: Any, folder: Path) -> Path:
    """Write what `asynchrony.py` would, had it measured what a simulation says."""
    load = module.Load(4, 4, module.MEASURED_TOKENS, module.heavy_tailed(20, 1.0), prompt_tokens=0)
    speed = module.Speed(((0, 0.01), (1000, 0.51)), train=0.5, sync=0.2)
    rows: dict[str, Any] = {}
    for mode, setting in {
        "synchronous": module.Setting(),
        "1 wait": module.Setting(staleness=1),
        "3 keep": module.Setting(staleness=3, on_update="keep"),
    }.items():
        one = module.simulate(load, speed, setting, 14, 2)
        lengths = [
            [load.length(f"train-{4 * at + group}-{index}-0", 600) for group in range(4) for index in range(4)]
            for at in range(14)
        ]
        rollouts = [0.01 * max(some) + 0.0005 * sum(some) for some in lengths]
        phases = {"step": one["step_seconds"], "sync": 0.2, "rollouts": rollouts}
        rows[mode] = [{"steps": 14, "warm": 2, "samples_per_second": one["samples_per_second"], **phases}]
    (folder / "measured.json").write_text(json.dumps({"command": [], **rows}))
    return folder / "measured.json"


def test_asynchronous_runs_are_predicted_from_synchronous_ones(tmp_path: Path) -> None:
    module: Any = importlib.import_module("simulate")
    found = module.predict(measured(module, tmp_path))
    assert {mode: one["ratio"] for mode, one in found.items()} == pytest.approx(dict.fromkeys(found, 1.0), rel=1e-3)
    assert found["3 keep"]["measured"] > 1.5 * found["synchronous"]["measured"]


@pytest.mark.parametrize(
    ("fault", "noticed"), [("many", "12 groups in flight"), ("old", "lag"), ("twice", "4 were trained before")]
)
def test_the_simulator_notices_a_scheduler_that_breaks_its_promise(fault: str, noticed: str) -> None:
    module: Any = importlib.import_module("simulate")
    load = module.Load(4, 2, 64, module.lognormal(32, 0.8))
    run = module.Simulation(load, module.Speed(), module.Setting(staleness=1, on_update="keep"))
    rollouts, take = run.rollouts, run.rollouts.take
    if fault == "twice":
        taken: list[Any] = []
        rollouts.take = lambda count: taken.append(take(count)) or taken[0]
    elif fault == "many":
        rollouts.plan = module.RolloutPlan(4, 2)
    else:
        run.publish = lambda: None  # engines keep their weights
    with pytest.raises(module.BrokenInvariant, match=noticed):
        run.run(8)
    run.close()
