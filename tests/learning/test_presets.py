"""Every preset learns a small task through the real loop, in one process."""

import json
import random
import re
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from transformers import AutoTokenizer

from tests.support.letters import letters_command, rows_of, run_letters
from tests.support.tiny import make_tiny_model
from tests.support.tool_calls import TOOL_TALK, TOOL_TEMPLATE, TOOLS
from trueline.cli import main
from trueline.config.algorithm import PRESETS

STEPS = 16


def train(folder: Path, preset: str, *words: str) -> list[dict[str, float]]:
    assert run_letters(folder, preset, f"steps={STEPS}", *words) == 0
    return rows_of(folder)[1:]


ANSWERS = 64  # per step, whatever the group size
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))]
MARGIN = 0.25


RARE, SLOW = pytest.mark.soak, pytest.mark.slow
PRESET_MARKS = {"grpo": [], "ppo": SLOW, "dapo": SLOW, "reinforce++": SLOW}
TAUGHT = ("sdft", "sdpo", "opsd")
LEARNT = [
    pytest.param(name, marks=PRESET_MARKS.get(name, RARE))
    for name in PRESETS
    if name not in ("on_policy_distill", *TAUGHT)
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("preset", LEARNT)
def test_preset_learns(preset: str, seed: int, tmp_path: Path) -> None:
    """Of 259 bytes 26 are letters: a random policy earns about 0.1. The last three steps beat the first by MARGIN."""
    size = PRESETS[preset]["group_size"]
    words = [f"prompts_per_step={ANSWERS // size}", f"seed={seed}", *SETTINGS.get(preset, [])]
    rows = train(tmp_path, preset, *words)
    assert rows[0]["reward/mean"] < 0.2
    assert fmean(row["reward/mean"] for row in rows[-3:]) > rows[0]["reward/mean"] + MARGIN
    assert all(row["policy/ratio_deviation_max"] < 1e-4 for row in rows if "policy/ratio" in row)


LETTERS, OTHERS = "abcdefghijklmnopqrstuvwxyz", "0123456789 .,;:!?-+*/=()<>ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that replies in letters where letters come before the prompt, and otherwise writes anything."""
    folder, draw = tmp_path_factory.mktemp("follower"), random.Random(0)
    make_tiny_model(folder / "start", tied=True)
    rows = []
    for number in range(3000):
        shown = "".join(draw.choices(LETTERS, k=8)) + "\n" if number % 2 else ""
        reply = "".join(draw.choices(LETTERS if shown else LETTERS + OTHERS, k=8))
        rows.append({"prompt": f"{shown}{number % 30}:", "completion": reply})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["training.learning_rate=2e-3", "monitoring.tensorboard=false", "monitoring.doctor=false"]
    named = ["--model", f"{folder}/start", "--data", f"{folder}/rows.jsonl", "--name", "sft", *words]
    assert main(["sft", *named, "runtime=local", f"folder={folder}"]) == 0
    return next((folder / "sft" / "checkpoints").glob("step_*")) / "model"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("preset", [pytest.param(name, marks=SLOW if name != "sdpo" else ()) for name in TAUGHT])
def test_a_policy_learns_from_itself_what_it_does_with_more_at_hand(
    preset: str, seed: int, follower: Path, tmp_path: Path
) -> None:
    """Letters before the prompt make the teacher reply in letters; the policy comes to do so without."""
    column, draw = "solution" if preset == "opsd" else "demonstration", random.Random(1)
    size = PRESETS[preset]["group_size"]
    words = [f"prompts_per_step={ANSWERS // size}", f"seed={seed}", "steps=8", "algorithm.distillation.rewarded=0.375"]
    command = letters_command(tmp_path, preset, *words, f"algorithm.distillation.template={{{column}}}\n{{prompt}}")
    rows = [{"prompt": f"{number}:", column: "".join(draw.choices(LETTERS, k=8))} for number in range(30)]
    kept = ("prompt",) if preset == "sdpo" else ("prompt", column)  # whose demonstrations are the group's own
    lines = [json.dumps({name: row[name] for name in kept}) for row in rows]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    command[command.index("--model") + 1] = str(follower)
    assert main(command) == 0
    found = rows_of(tmp_path)[1:]
    assert found[0]["reward/mean"] < 0.5 and found[0]["distill/taught_share"] > 0.8
    assert fmean(row["reward/mean"] for row in found[-3:]) > found[0]["reward/mean"] + MARGIN
    assert found[-1]["distill/divergence"] < found[0]["distill/divergence"] / 4


SETTINGS = {  # what answers of eight tokens, all of which reach the length limit, ask for
    "ppo": ["critic.learning_rate=1e-3"],
    "remax": ["steps=30", "training.learning_rate=2e-3"],  # the greedy answer is a noisy baseline
    "dapo": ["algorithm.shaping.overlong_factor=0.2"],
    "vapo": ["critic.learning_rate=1e-3", "algorithm.critic_warmup_steps=2", "algorithm.length_adaptive=1", "steps=24"],
}


@pytest.mark.slow
def test_ppos_critic_explains_the_returns(tmp_path: Path) -> None:
    rows = train(tmp_path, "ppo", f"prompts_per_step={ANSWERS}", "steps=24", *SETTINGS["ppo"])
    assert abs(rows[0]["critic/explained_variance"]) < 0.05  # a new critic says 0
    assert fmean(row["critic/explained_variance"] for row in rows[-5:]) > 0.3


@pytest.mark.slow
def test_on_policy_distillation_closes_half_of_the_gap_to_its_teacher(tmp_path: Path) -> None:
    """The teacher learnt letters by dr_grpo; the student starts where the teacher did, and sees no reward."""
    train(tmp_path / "teacher", "dr_grpo", "prompts_per_step=8")
    teacher = tmp_path / "teacher" / "run" / "checkpoints" / f"step_{STEPS:06d}" / "model"
    words = [f"prompts_per_step={ANSWERS}", f"teacher.path={teacher}", "reward.function=", "steps=24"]
    rows = train(tmp_path / "student", "on_policy_distill", *words)
    assert not [name for name in rows[0] if name.startswith("reward/")]
    gaps = [row["distill/kl_per_token"] for row in rows]
    assert gaps[0] > 0.5
    assert fmean(gaps[-3:]) < gaps[0] / 2


def test_staleness_is_bounded_and_still_learns(tmp_path: Path) -> None:
    rows = train(tmp_path, "dr_grpo", "rollout.max_staleness=1")
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    assert not any("health/staleness" in row for row in rows)  # the run allows it
    assert fmean(row["reward/mean"] for row in rows[-3:]) > rows[0]["reward/mean"] + 0.2


def test_adapters_learn_and_are_their_own_reference(tmp_path: Path) -> None:
    """The engine gets merged weights (each publishing is checked); the reference is the policy without adapters."""
    rows = train(tmp_path, "grpo", "model.lora.rank=8", "training.learning_rate=1e-2")
    assert fmean(row["reward/mean"] for row in rows[-3:]) > rows[0]["reward/mean"] + 0.25
    assert rows[0]["policy/kl"] < 1e-6 < rows[-1]["policy/kl"]


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    first, again = (train(tmp_path / name, "grpo", "steps=3", "seed=4") for name in ("first", "again"))
    for key in ("reward/mean", "loss", "grad_norm"):
        assert [row[key] for row in first] == [row[key] for row in again]


@pytest.mark.parametrize("preset", ["grpo", pytest.param("ppo", marks=SLOW)])
def test_a_resumed_run_equals_an_uninterrupted_one(preset: str, tmp_path: Path) -> None:
    """Two steps and two more after --resume are four steps, to the last digit; a critic goes on too."""
    words = ["algorithm.kl.target=0.1", "algorithm.kl.horizon=100"]
    whole = train(tmp_path / "whole", preset, "steps=4", *words)
    train(tmp_path / "parts", preset, "steps=2", *words)
    assert main([preset, "--resume", "--name", "run", f"folder={tmp_path}/parts", "steps=4"]) == 0
    parts = rows_of(tmp_path / "parts")[1:]
    keys = ["reward/mean", "loss", "grad_norm", "mismatch/logprob_gap_mean", "policy/kl_coefficient"]
    for key in keys + (["critic/loss", "critic/grad_norm"] if preset == "ppo" else ["policy/kl"]):
        assert [row[key] for row in whole] == [row[key] for row in parts]
    assert len({row["policy/kl_coefficient"] for row in whole}) == 4  # it adapts


@pytest.mark.soak
@pytest.mark.parametrize("loss", ["sapo", "gmpo"])
def test_other_losses_learn(loss: str, tmp_path: Path) -> None:
    rows = train(tmp_path, "grpo", f"algorithm.loss={loss}")
    assert fmean(row["reward/mean"] for row in rows[-3:]) > rows[0]["reward/mean"] + MARGIN


@pytest.mark.soak
@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_drops_tokens_of_later_minibatches_and_learns(divergence: str, tmp_path: Path) -> None:
    words = [f"algorithm.divergence={divergence}", "algorithm.clip_low=0.02", "algorithm.clip_high=0.02"]
    rows = train(tmp_path, "dppo", "minibatches=4", *words)
    assert fmean(row["reward/mean"] for row in rows[-3:]) > rows[0]["reward/mean"] + MARGIN
    assert max(row["policy/clip_fraction"] for row in rows) > 0.01


EARLY = """

def early(reply: str) -> float:
    return sum("a" <= character <= "m" for character in reply) / 800
"""


@pytest.mark.slow
def test_gdpo_learns_a_reward_that_hardly_varies(tmp_path: Path) -> None:
    """Letters are worth up to 1, those of the first half of the alphabet 0.01 more."""
    command = letters_command(tmp_path, "gdpo", "steps=24", "--config", f"{tmp_path}/rewards.yaml")
    with (tmp_path / "reward.py").open("a") as file:
        file.write(EARLY)
    parts = {name: {"function": f"{tmp_path}/reward.py:{name}"} for name in ("letters", "early")}
    (tmp_path / "rewards.yaml").write_text(yaml.safe_dump({"reward": {"parts": parts}}))
    at = command.index("--reward")
    assert main(command[:at] + command[at + 2 :]) == 0
    rows = rows_of(tmp_path)[1:]
    assert rows[0]["reward/part/early"] < 0.001
    assert fmean(row["reward/part/early"] for row in rows[-3:]) > 0.007


@pytest.mark.slow
def test_a_fifth_of_the_tokens_teaches(tmp_path: Path) -> None:
    """Those of the highest entropy, by the weights that the update starts from."""
    rows = train(tmp_path, "dr_grpo", "algorithm.top_entropy_share=0.2", "steps=32")
    assert fmean(row["reward/mean"] for row in rows[-3:]) > rows[0]["reward/mean"] + MARGIN
    assert all(row["policy/ratio_deviation_max"] < 1e-4 for row in rows)
    (tmp_path / "all").mkdir()
    first = train(tmp_path / "all", "dr_grpo", "steps=1")[0]
    assert 0 < rows[0]["grad_norm"] < first["grad_norm"]


def test_sampling_from_the_likeliest_tokens_is_what_the_update_reckons_with(tmp_path: Path) -> None:
    """Engine and trainer agree on what was kept, so that ratios are 1, and draws are honest; and it still learns."""
    rows = train(tmp_path, "dr_grpo", "rollout.top_k=100", "rollout.top_p=0.9", "rollout.temperature=0.8")
    assert max(row["mismatch/logprob_gap_max"] for row in rows) < 1e-4
    assert all(row["policy/ratio_deviation_max"] < 1e-4 for row in rows)
    assert abs(rows[5]["mismatch/sampler_z_run"]) < 4  # later it is certain
    assert fmean(row["reward/mean"] for row in rows[-3:]) > rows[0]["reward/mean"] + MARGIN


ECHO = """
class Clerk:
    def reset(self, prompt):
        self.turns = 0

    def step(self, reply):
        self.turns += 1
        return {"messages": "noted, and what else?", "reward": 0.5, "done": self.turns == 2}
"""


def test_a_policy_learns_what_its_environment_answers(tmp_path: Path) -> None:
    """All rewards are equal, so that nothing else teaches; without the loss, answers stay as unlikely as they were."""
    (tmp_path / "clerk.py").write_text(ECHO)
    words = [f"environment.function={tmp_path}/clerk.py:Clerk", "reward.function=", "rollout.max_new_tokens=64"]
    words += [
        "environment.max_turn_tokens=4",
        "rollout.max_prompt_tokens=64",
        "prompts_per_step=4",
        "algorithm.group_size=2",
        "steps=12",
    ]
    rows = train(tmp_path, "dr_grpo", *words, "algorithm.observation_loss=0.5")
    found = [row["policy/observation_loss"] for row in rows]
    assert 4 < found[0] < 8 and found[-1] < found[0] - 1 and rows[0]["grad_norm"] > 0
    assert rows[0]["loss"] == pytest.approx(0.5 * found[0], rel=1e-4)
    (tmp_path / "without").mkdir()
    (plain,) = train(tmp_path / "without", "dr_grpo", *words, "steps=1")
    assert plain["grad_norm"] == 0 and "policy/observation_loss" not in plain


def test_old_logprobs_may_be_the_engines(tmp_path: Path) -> None:
    words = ["algorithm.old_logprobs=rollout", "algorithm.importance_sampling.mode=token_mask", "minibatches=2"]
    rows = train(tmp_path, "cispo", *words)
    assert fmean(row["reward/mean"] for row in rows[-3:]) > rows[0]["reward/mean"] + MARGIN


def test_mixed_datasets_and_several_rewards_report_each(tmp_path: Path) -> None:
    train(tmp_path / "first", "dr_grpo", "steps=1")
    files = [tmp_path / "first" / "prompts.jsonl", tmp_path / "other.jsonl"]
    files[1].write_text(files[0].read_text())
    config = tmp_path / "mixed.yaml"
    letters = f"{tmp_path}/first/reward.py:letters"
    parts = {
        "letters": {"function": letters},
        "short": {"function": "length", "options": {"maximum": 4}, "weight": -0.5, "clip": 0.25},
    }
    data = {"mixture": {str(file): 1.0 for file in files}}
    settings = {"data": data, "reward": {"parts": parts}, "model": {"path": f"{tmp_path}/first/model"}, "steps": 1}
    config.write_text(yaml.safe_dump(settings))
    words = ["runtime=local", "prompts_per_step=8", "rollout.max_new_tokens=8", f"folder={tmp_path}", "name=mixed"]
    assert main(["dr_grpo", "--config", str(config), *words]) == 0
    row = json.loads((tmp_path / "mixed" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"reward/source/prompts", "reward/source/other"} <= set(row)
    assert abs(row["reward/part/short"]) <= 0.25
    expected = row["reward/part/letters"] - 0.5 * row["reward/part/short"]
    assert row["reward/mean"] == pytest.approx(expected, abs=1e-6)


def test_an_evaluation_that_a_kill_cut_off_is_made_up_for(tmp_path: Path) -> None:
    """As if the run had ended between the last checkpoint and its evaluation."""
    words = [f"evaluation.data={tmp_path}/prompts.jsonl", "evaluation.limit=4", "steps=2"]
    whole = train(tmp_path, "dr_grpo", *words)[-1]["evaluation/reward"]
    run = tmp_path / "run"
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    (run / "checkpoints" / "step_000002" / "metrics.json").write_text(json.dumps({"loss": 0.5}))
    assert main(["dr_grpo", "--resume", "--name", "run", f"folder={tmp_path}"]) == 0
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[-1]["loss"], rows[-1]["evaluation/reward"]) == (0.5, whole)


@pytest.mark.slow
def test_a_rate_that_moves_nothing_is_told_and_one_that_does_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate, warned in (("1e-6", True), ("1e-3", False)):
        train(tmp_path / rate, "dr_grpo", "steps=20", f"training.learning_rate={rate}")
        said = capsys.readouterr().out
        assert bool(re.search(r"learning_rate=1e-06 is far from \S+, the default", said)) is warned
        assert ("in 20 steps reward/mean has not moved beyond its noise" in said) is warned
        assert bool(re.search(r"about \S+ suits a model of this size: raise it", said)) is warned


def test_prompts_with_tools_and_a_template_file(tmp_path: Path) -> None:
    """A prompt that ends with a tool's message: the reward sees messages and tools, the model keeps the template."""
    make_tiny_model(tmp_path / "model", tied=True)
    row = {"messages": TOOL_TALK[:3], "tools": json.dumps(TOOLS), "answer": "two"}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "chat.jinja").write_text("{{ greeting }}" + TOOL_TEMPLATE)
    expected = ("2", TOOL_TALK[:3], TOOLS)
    reward = f"def seen(prompt, messages, tools):\n    return float((prompt, messages, tools) == {expected!r})\n"
    (tmp_path / "reward.py").write_text(reward)
    named = ["--model", f"{tmp_path}/model", "--data", f"{tmp_path}/prompts.jsonl", "--name", "run"]
    words = ["runtime=local", f"folder={tmp_path}", "steps=1", "prompts_per_step=1", "rollout.max_new_tokens=4"]
    words += [f"data.chat_template={tmp_path}/chat.jinja", "monitoring.tensorboard=false", "monitoring.doctor=false"]
    words += ["data.chat_template_kwargs={greeting: hi}"]
    assert main(["grpo", *named, "--reward", f"{tmp_path}/reward.py:seen", *words]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["reward/mean"] == 1.0
    transcripts = [json.loads(line) for line in (tmp_path / "run" / "transcripts.jsonl").read_text().splitlines()]
    assert {one["prompt"] for one in transcripts} == {"2"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "checkpoints" / "step_000001" / "model")
    assert tokenizer.chat_template.endswith(TOOL_TEMPLATE)
    assert tokenizer.apply_chat_template(TOOL_TALK[:1], tokenize=False).startswith("hi<user>")  # which goes with it
