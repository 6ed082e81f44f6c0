"""Scoring heads of vision-language models: the scores, losses and gradients of a bare backbone of Transformers.

Covers `trueline.models.vision`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, logsigmoid
from transformers import AutoModel

from tests.contract.test_pictures import MAKERS, ROWS, TOLERANCE, UNPACKED, picture, samples_of
from tests.support.pictures import make_picture, make_tiny_idefics
from tests.support.ranks import run_ranks, started
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.data import DataConfig
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.config.supervised import RewardModelConfig
from trueline.data.batching import Budget, pack_samples, plan_micro_batches
from trueline.data.encoding import encode_steps
from trueline.data.formats import read_steps
from trueline.data.rows import Located
from trueline.data.types import Sample
from trueline.models.loading import check_model, load_chat, load_model
from trueline.models.vision import load_processor
from trueline.models.weight_names import described_model
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

SETTINGS = {"reward": LossSettings(1.0, RewardModelConfig()), "steps": LossSettings()}
LOSSES = {"reward": "reward_model", "steps": "process_reward"}
PACKING = [(family, packing) for family in MAKERS for packing in (True, False) if not (packing and family in UNPACKED)]
QUICK = ("idefics3", "qwen2_5_vl")


class Case(NamedTuple):
    worker: Worker
    samples: list[Sample]
    path: str


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("heads")

    def make(family: str) -> str:
        return str(folder / family if (folder / family).exists() else MAKERS[family](folder / family))

    return make


def parts_of(row: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in ROWS[row][1]]


def step_samples(path: str) -> list[Sample]:
    """Rows whose answers are two steps: the good one, then the worse one."""
    located = []
    for number, (shown, _, good, bad) in enumerate(ROWS):
        images = [{"bytes": picture(seed), "path": None} for seed in shown]
        row = {"prompt": [{"role": "user", "content": parts_of(number)}], "images": images}
        located.append(Located({**row, "completions": [good, bad], "labels": [1, 0]}, f"row {number}"))
    records, _ = read_steps(located, DataConfig())
    samples = encode_steps(records, load_chat(ModelConfig(path=path), "auto"), 400, "error", "\n").samples
    set_weights(samples, "token_mean", 0)
    return samples


def make_case(path: str, head: str, packing: bool) -> Case:
    model = ModelConfig(path=path, dtype="float32", train_vision="all")
    training = TrainingConfig(engine="torch", learning_rate=1e-12, packing=packing)
    worker = started(Worker(WorkerSpec(model, training, 0, 1, 100, 0, head=head)))
    return Case(worker, step_samples(path) if head == "steps" else samples_of(path, "preference", {}), path)


def bare_states(backbone: Any, path: str, row: int, answer: str) -> Tensor:
    """Return the hidden states of one sequence, [T, D], by the model's processor and the bare backbone."""
    processor = load_processor(ModelConfig(path=path), backbone.config.model_type)
    asked = processor.apply_chat_template([{"role": "user", "content": parts_of(row)}], add_generation_prompt=True)
    images = [make_picture(seed, 20 * seed, 40) for seed in ROWS[row][0]]
    batch = processor(
        text=[asked + answer], images=[images] if images else None, add_special_tokens=False, return_tensors="pt"
    )
    return backbone(**batch).last_hidden_state[0]


def bare_loss(case: Case, backbone: Any, head: Any) -> Tensor:
    rows = range(len(ROWS))
    if case.worker.spec.head == "steps":
        separate, found = load_chat(ModelConfig(path=case.path), "auto"), []
        for row in rows:
            steps = [f"{answer}\n" for answer in ROWS[row][2:]]
            last = len(separate.text_tokens(steps[1])) + 1
            states = bare_states(backbone, case.path, row, "".join(steps))
            found.append(linear(states[[-last, -1]], head.weight, head.bias))
        return cross_entropy(torch.cat(found), torch.tensor([1, 0] * len(ROWS)))
    chosen, rejected = (
        torch.stack([head(bare_states(backbone, case.path, row, f"{ROWS[row][at]}</s>")[-1])[0] for row in rows])
        for at in (2, 3)
    )
    return -logsigmoid(chosen - rejected).mean()


@pytest.mark.parametrize("head", SETTINGS)
@pytest.mark.parametrize(
    ("family", "packing"), [one if one[0] in QUICK else pytest.param(*one, marks=pytest.mark.slow) for one in PACKING]
)
def test_loss_and_gradient_are_those_of_a_bare_backbone(
    family: str, packing: bool, head: str, models: Callable[[str], str]
) -> None:
    """One pass has no picture, so that it looks at a blank one."""
    case = make_case(models(family), head, packing)
    together = 1 + (head == "reward")
    lengths = [sample.length() for sample in case.samples]
    (passes,) = plan_micro_batches(lengths, 1, Budget(10_000, together, packing), together)
    report = case.worker.accumulate(pack_samples(case.samples), passes, LOSSES[head], SETTINGS[head])
    gradients = {name: torch.from_numpy(one) for name, one in case.worker.gradients().items()}
    backbone = AutoModel.from_pretrained(case.path)
    score = torch.nn.Linear(32, together % 2 + 1, bias=head == "steps")
    score.load_state_dict(case.worker.model.score.state_dict())
    expected = bare_loss(case, backbone, score)
    expected.backward()
    assert report.sums["loss"] == pytest.approx(expected.item(), abs=TOLERANCE)
    named = {f"model.{name}": one for name, one in backbone.named_parameters()}
    named |= {f"score.{name}": one for name, one in score.named_parameters()}
    plain = {name: one.grad for name, one in named.items() if one.grad is not None}
    whole = torch.stack([one.norm() for one in plain.values()]).norm()
    for name, one in plain.items():
        distance = (gradients[name] - one).norm() / max(one.norm(), 1e-3 * whole)
        assert distance < (5e-5 if family in UNPACKED else TOLERANCE), f"{name}: {distance:.2e}"


def reward_losses(rank: int, world: int, paths: list[str]) -> list[tuple[float, Any]]:
    """Return the loss of this rank's passes for each model, and its head; one pass of a rank has no picture."""
    found = []
    for path in paths:
        model = ModelConfig(path=path, dtype="float32", train_vision="all")
        training = TrainingConfig.parse({"engine": "deepspeed", "deepspeed": {"zero_stage": 3}, "learning_rate": 1e-12})
        worker = started(Worker(WorkerSpec(model, training, rank, world, 100, 0, head="reward")))
        samples = samples_of(path, "preference", {})
        plan = plan_micro_batches([one.length() for one in samples], world, Budget(10_000, 2, True), 2)
        report = worker.accumulate(pack_samples(samples), plan[rank], "reward_model", SETTINGS["reward"])
        found.append((report.sums["loss"], dict(worker.engine.weights())["score.weight"].numpy().copy()))
    return found


@pytest.mark.slow
def test_ranks_share_a_scoring_model(models: Callable[[str], str], tmp_path: Path) -> None:
    paths = [models(family) for family in ("idefics3", "qwen2_5_vl")]
    ranks = run_ranks(reward_losses, 2, tmp_path, paths)
    for path, (one, weight), (other, same) in zip(paths, *ranks, strict=True):
        assert (weight == same).all()
        case, head = make_case(path, "reward", True), torch.nn.Linear(32, 1, bias=False)
        head.load_state_dict({"weight": torch.from_numpy(weight)})
        assert one + other == pytest.approx(
            bare_loss(case, AutoModel.from_pretrained(path), head).item(), abs=TOLERANCE
        )


def test_balanced_experts_ignore_the_blank_picture(models: Callable[[str], str]) -> None:
    """A pass without pictures has as many routed tokens as its sequences."""
    model = ModelConfig(path=models("qwen3_vl_moe"), dtype="float32")
    training = TrainingConfig(engine="torch", learning_rate=1e-12, router_aux_loss_coef=0.1)
    for head in ("language", "reward"):
        worker = started(Worker(WorkerSpec(model, training, 0, 1, 100, 0, head=head)))
        samples = samples_of(model.path, "preference", {})[2:4]
        for sample in samples:
            sample.mask = torch.ones_like(sample.mask)
        counts = worker.count_experts(pack_samples(samples), [[0, 1]])
        layers, chosen = 2, 2
        assert sum(counts) == layers * chosen * sum(sample.length() for sample in samples)


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl"])
def test_a_critic_begins_at_zero_or_where_a_reward_model_ended(
    family: str, models: Callable[[str], str], tmp_path: Path
) -> None:
    """The value of a token is of the state before it, also in a pass without pictures."""
    path = models(family)
    new = make_case(path, "value", True)
    assert not new.worker.model.score.weight.any()
    judge = make_case(path, "reward", True).worker
    judge.save(str(tmp_path))
    assert (result := judge.save_result(wait=True)) and result.problem is None
    saved = str(tmp_path / "model")
    facts = check_model(ModelConfig(path=saved), "value")
    assert facts.family == family and facts.tower == check_model(ModelConfig(path=path)).tower
    described, held = described_model(tmp_path / "model"), load_file(tmp_path / "model" / "model.safetensors")
    assert type(described) is not None and type(described).__name__ == type(judge.model).__name__
    assert "score.weight" in held and not any("lm_head" in name for name in held)
    case = make_case(saved, "value", True)
    passes = [[0], [2], [4]]  # the good answers of the first three rows
    found = torch.from_numpy(case.worker.score(pack_samples(case.samples), passes, 1.0))
    backbone, head = AutoModel.from_pretrained(path), judge.model.score
    with torch.no_grad():
        states = [bare_states(backbone, path, row, f"{ROWS[row][2]}</s>") for row in range(3)]
        expected = torch.cat([torch.cat([torch.zeros(1), head(one)[:-1, 0]]) for one in states])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_what_is_frozen_of_a_scorer(tmp_path: Path) -> None:
    folder = make_tiny_idefics(tmp_path)
    for trained, expected in {"none": {"text_model"}, "all": {"text_model", "vision_model", "connector"}}.items():
        model = load_model(ModelConfig(path=str(folder), train_vision=trained), torch.float32, "reward")
        names = [name for name, one in model.named_parameters() if one.requires_grad]
        assert {name.split(".")[1] for name in names if name.startswith("model.")} == expected
        assert "score.weight" in names
