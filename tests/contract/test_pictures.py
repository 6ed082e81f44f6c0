"""Training on pictures: the losses and gradients of plain Transformers, however the work is divided.

Covers `trueline.models.vision`.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForImageTextToText

from tests.support.engines import ENGINES
from tests.support.model_table import WITH_PICTURES, check_cell
from tests.support.pictures import MAKERS, make_picture, png
from tests.support.ranks import run_ranks, started
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.data import DataConfig
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.config.supervised import PreferenceConfig
from trueline.data.batching import Budget, pack_samples, plan_micro_batches
from trueline.data.encoding import encode_conversations, encode_pairs
from trueline.data.formats import read_conversations, read_pairs
from trueline.data.rows import Located
from trueline.data.types import Sample
from trueline.models.loading import load_chat
from trueline.models.vision import load_processor
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

UNPACKED = ("qwen3_5",)  # a part of its layers is recurrent
GRADIENT_TOLERANCE = {"qwen3_5": 5e-5}  # plain Transformers in float32 is 2e-5 away from itself in float64
BETA, TOLERANCE = 0.1, 1e-5
SETTINGS = {"sft": LossSettings(), "preference": LossSettings(1.0, PreferenceConfig(beta=BETA))}
IMAGE = {"type": "image"}
ROWS = [  # pictures by their seeds, parts of the question, the answer, and a worse one
    ([1], [IMAGE, "what?"], "a cat", "dogs"),
    ([], ["no picture"], "words", "pixels!"),
    ([2, 3], ["first ", IMAGE, " and ", IMAGE, " ?"], "two", "three"),
    ([4], [IMAGE, "and this?"], "noise again", "a"),
]


@dataclass(frozen=True)
class Case:
    """How the work is divided."""

    family: str = "idefics3"
    engine: str = "torch"
    packing: bool = True
    rows: int | None = None  # per pass
    world: int = 1
    checkpointing: bool = False

    def name(self) -> str:
        flags = ["padded"] * (not self.packing) + ["checkpointing"] * self.checkpointing
        parts = [self.family, self.engine, f"ranks{self.world}", f"rows{self.rows}", *flags]
        return "-".join(parts)

    def column(self) -> str:
        return "two ranks, ZeRO 0 and 3" if self.world > 1 else "packed" if self.packing else "padded"


ALONE = [
    *(
        Case(family, packing=packing, rows=rows)
        for family in MAKERS
        for packing in (True, False)
        for rows in (None, 2)
        if not (packing and family in UNPACKED)
    ),
    *(Case(family, checkpointing=True) for family in ("idefics3", "qwen2_5_vl")),
    *(Case(engine=engine, rows=1) for engine in ("zero0", "zero2", "zero3", "fsdp2")),
    *(Case("qwen2_5_vl", engine, packing, rows=1) for engine in ("zero0", "zero3") for packing in (True, False)),
]
# With one row per pass, a pass of one rank has no picture, while the other rank's has.
PAIR = [Case(engine=engine, rows=1, world=2) for engine in ("zero0", "zero2", "zero3", "fsdp2")]
PAIR += [
    Case("qwen2_5_vl", engine, packing, rows=1, world=2)
    for engine in ("zero0", "zero3", "fsdp2")
    for packing in (True, False)
]


def picture(seed: int) -> bytes:
    return png(make_picture(seed, 20 * seed, 40))


def samples_of(model: str, loss: str, seeds: dict[int, int]) -> list[Sample]:
    """Read, render and encode the rows as a run does; `seeds` replaces pictures."""
    chat = load_chat(ModelConfig(path=model), "auto")
    located = []
    for number, (shown, parts, good, bad) in enumerate(ROWS):
        question = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        answers = {"completion": good} if loss == "sft" else {"chosen": good, "rejected": bad}
        images = [{"bytes": picture(seeds.get(seed, seed)), "path": None} for seed in shown]
        row = {"prompt": [{"role": "user", "content": question}], **answers, "images": images}
        located.append(Located(row, f"row {number}"))
    if loss == "sft":
        samples = encode_conversations(read_conversations(located, DataConfig())[0], chat, 400, "all", "error").samples
        set_weights(samples, "token_mean", 0)
        return samples
    samples = encode_pairs(read_pairs(located, DataConfig())[0], chat, 400, "error").samples
    set_weights(samples, "sequence_sum", 0)
    for sample in samples:
        sample.ref_logprobs = torch.zeros(sample.length())
    return samples


def take(rank: int, world: int, models: dict[str, str], cases: list[Case], seeds: dict[int, int]) -> dict[Any, Any]:
    """Return the loss of this rank's passes, and the gradient, for every case."""
    found = {}
    for case in cases:
        model = ModelConfig(
            path=models[case.family],
            dtype="float32",
            train_vision="all",
            gradient_checkpointing=case.checkpointing,
            head_chunk_tokens=7,
        )
        keys = ENGINES[case.engine] | {"learning_rate": 1e-12, "packing": case.packing}
        worker = started(Worker(WorkerSpec(model, TrainingConfig.parse(keys), rank, world, 100, 0)))
        for loss, settings in SETTINGS.items():
            samples, together = samples_of(models[case.family], loss, seeds), 1 + (loss == "preference")
            lengths = [sample.length() for sample in samples]
            plan = plan_micro_batches(
                lengths, world, Budget(10_000, case.rows and case.rows * together, case.packing), together
            )
            report = worker.accumulate(pack_samples(samples), plan[rank], loss, settings)
            found[case, loss] = report.sums["loss"], worker.gradients()
            worker.engine.step()
    return found


def plain_logprobs(model: Any, processor: Any, texts: list[tuple[str, str]], seeds: list[list[int]]) -> list[Any]:
    """Return the log-probs of each completion's tokens: a padded batch of the processor, and the model's logits."""
    images = [[make_picture(seed, 20 * seed, 40) for seed in shown] for shown in seeds]
    found = []
    for with_pictures in (True, False):  # a batch of the processor has pictures in all rows, or in none
        chosen = [at for at in range(len(texts)) if bool(images[at]) == with_pictures]
        given = {"images": [images[at] for at in chosen]} if with_pictures else {}
        whole = ["".join(texts[at]) for at in chosen]
        batch = processor(text=whole, **given, padding=True, add_special_tokens=False, return_tensors="pt")
        scores = model(**batch).logits.log_softmax(-1)
        for row, at in enumerate(chosen):
            size, length = len(texts[at][1]) - len("</s>") + 1, int(batch["attention_mask"][row].sum())
            tokens = batch["input_ids"][row, length - size : length]
            assert processor.tokenizer.padding_side == "right" and tokens[-1] == processor.tokenizer.eos_token_id
            before = scores[row, length - size - 1 : length - 1]
            found.append((at, before.gather(-1, tokens[:, None])[:, 0]))
    return [logprobs for _, logprobs in sorted(found, key=lambda pair: pair[0])]


def plain_loss(model: Any, processor: Any, loss: str) -> torch.Tensor:
    def asked(parts: list[Any]) -> str:
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        return str(processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True))

    seeds = [row[0] for row in ROWS]
    good = plain_logprobs(model, processor, [(asked(row[1]), f"{row[2]}</s>") for row in ROWS], seeds)
    if loss == "sft":
        return -torch.cat(good).mean()
    bad = plain_logprobs(model, processor, [(asked(row[1]), f"{row[3]}</s>") for row in ROWS], seeds)
    margins = torch.stack([one.sum() - other.sum() for one, other in zip(good, bad, strict=True)])
    return -logsigmoid(BETA * margins).mean()


class Divisions:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = {family: str(make(folder / family)) for family, make in MAKERS.items()}
        self.found: dict[Any, tuple[float, dict[str, np.ndarray]]] = {}

    def take(self, case: Case, loss: str) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss summed over ranks, and the gradient, which every rank has."""
        if (case, loss) not in self.found:
            cases = ALONE if case.world == 1 else PAIR
            ranks = run_ranks(take, case.world, self.folder / f"ranks{case.world}", self.models, cases, {})
            for key in ranks[0]:
                self.found[key] = sum(results[key][0] for results in ranks), ranks[0][key][1]
        return self.found[case, loss]

    @cache  # noqa: B019
    def plain(self, family: str, loss: str) -> tuple[float, dict[str, np.ndarray]]:
        path = self.models[family]
        model, processor = (
            AutoModelForImageTextToText.from_pretrained(path),
            load_processor(ModelConfig(path=path), family),
        )
        value = plain_loss(model, processor, loss)
        value.backward()
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return value.item(), {name: one.numpy() for name, one in gradients.items()}


@pytest.fixture(scope="module")
def divisions(tmp_path_factory: pytest.TempPathFactory) -> Divisions:
    return Divisions(tmp_path_factory.mktemp("pictures"))


@pytest.mark.models
@pytest.mark.parametrize("loss", SETTINGS)
@pytest.mark.parametrize("case", [*ALONE, *(pytest.param(one, marks=pytest.mark.slow) for one in PAIR)], ids=Case.name)
def test_loss_and_gradient_are_those_of_transformers(case: Case, loss: str, divisions: Divisions) -> None:
    (value, gradients), (expected_value, expected) = divisions.take(case, loss), divisions.plain(case.family, loss)
    assert value == pytest.approx(expected_value, abs=TOLERANCE)
    assert any("vis" in name for name in expected)
    whole = np.sqrt(sum(np.square(tensor).sum() for tensor in expected.values()))
    for name, tensor in expected.items():
        # The gradient of a bias of keys is rounding: softmax does not change with it.
        distance = np.linalg.norm(gradients[name] - tensor) / max(np.linalg.norm(tensor), 1e-3 * whole)
        assert distance < GRADIENT_TOLERANCE.get(case.family, TOLERANCE), f"{name}: {distance:.2e}"
    rough = GRADIENT_TOLERANCE.get(case.family)
    found = f"losses exact, gradients to {rough:.0e}" if rough else "exact"
    check_cell(WITH_PICTURES[case.family], case.column(), found)


@pytest.mark.slow
@pytest.mark.parametrize("family", MAKERS)
def test_other_pictures_are_another_loss(family: str, divisions: Divisions) -> None:
    case = Case(family, packing=family not in UNPACKED)
    for name, seeds in {"exchanged": {2: 3, 3: 2}, "replaced": {1: 5}}.items():
        folder = divisions.folder / f"{family}-{name}"
        (results,) = run_ranks(take, 1, folder, divisions.models, [case], seeds)
        for loss in SETTINGS:
            assert abs(results[case, loss][0] - divisions.take(case, loss)[0]) > 1e-4, (name, loss)
