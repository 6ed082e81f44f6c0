"""From rows in files to the plan of a run, and what the loop asks of its parts."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.support.tool_calls import TOOL_TALK, TOOL_TEMPLATE, TOOLS
from trueline.algorithms.losses import LOSSES
from trueline.config.base import ConfigError
from trueline.config.supervised import DistillConfig, KTOConfig, PreferenceConfig, RewardModelConfig, SupervisedConfig
from trueline.data.batching import Budget
from trueline.data.chat import ChatFormat
from trueline.data.sources import open_source
from trueline.data.types import Sample
from trueline.jobs.preview import show_rows
from trueline.models.loading import ModelFacts, load_model
from trueline.offline.build import worker_specs
from trueline.offline.trainer import describe_start
from trueline.plan import offline as planning
from trueline.plan.describe import describe
from trueline.plan.offline import SupervisedPlan, plan_supervised
from trueline.plan.tasks import TASKS, Dataset, check_longest, encode_sources, load_material
from trueline.runtime.cluster import Machine
from trueline.verbs import TASK_VERBS

PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "0" * (1 + n % 3)} for n in range(6)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(6)],
    "preference": PAIRS,
    "rm": PAIRS,
    "kto": [{"prompt": f"{n}+1=", "completion": str(n + 1), "label": n % 2 == 0} for n in range(6)],
    "prm": [{"prompt": f"{n}+1=", "completions": [f"{n}", f"{n + 1}"], "labels": [True, n % 2 == 0]} for n in range(6)],
}
ROWS["distill"] = ROWS["sft"]


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def load(model_folder: Path, tmp_path: Path) -> Any:
    def make(verb: str, *overrides: str, rows: list[dict[str, Any]] | None = None) -> SupervisedConfig:
        chosen = TASK_VERBS[verb]
        file = write(tmp_path, rows or ROWS[chosen.kind.task])
        given = [f"model.path={model_folder}", f"data.path={file}", "runtime=local", "samples_per_step=2"]
        teacher = [f"distill.teacher={model_folder}"] if verb == "distill" else []
        return chosen.kind.load([], [*given, *teacher, *overrides], chosen.defaults)

    return make


@pytest.mark.parametrize("verb", sorted(TASK_VERBS))
def test_every_verb_makes_a_plan(load: Any, verb: str) -> None:
    plan = plan_supervised(load(verb))
    train = plan.material.train
    assert (train.rows(), plan.steps) == (6, 3)
    assert len(train.samples) == 6 * train.task.samples_per_row
    assert all(sample.sampled_tokens() > 0 for sample in train.samples)
    assert sum(sample.companion is not None for sample in train.samples) == (6 if verb == "kto" else 0)
    assert plan.config.max_tokens == 64  # the model's context


@pytest.mark.parametrize("verb", sorted(TASK_VERBS))
def test_a_task_names_a_loss_and_settings_of_its_own(load: Any, verb: str) -> None:
    config = load(verb)
    task = TASKS[config.task]
    assert task.reference(config) == (verb in ("dpo", "cdpo", "ipo", "kto"))
    assert task.samples_per_row == (2 if verb in ("dpo", "cdpo", "ipo", "simpo", "orpo", "rm") else 1)
    assert task.head == {"rm": "reward", "prm": "steps"}.get(verb, "language")
    assert task.loss in LOSSES
    assert (task.distillation_target(config) is not None) == (verb == "distill")
    kinds = {"rm": RewardModelConfig, "kto": KTOConfig, "distill": DistillConfig}
    plain = type(None) if verb in ("sft", "prm") else PreferenceConfig
    assert type(task.section_of(config)) is kinds.get(verb, plain)


def test_the_completion_and_its_end_are_learnt(load: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    sample = plan_supervised(load("sft")).material.train.samples[0]
    prompt = len(tokenizer("0+1=")["input_ids"])
    assert sample.mask.tolist() == [False] * prompt + [True, True]
    assert sample.tokens[-1] == tokenizer.eos_token_id


def test_a_row_that_is_too_long_is_named(load: Any) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl.*6 tokens, more than max_tokens=5"):
        plan_supervised(load("sft", "max_tokens=5"))


def test_epochs_and_rows_make_the_steps(load: Any) -> None:
    assert plan_supervised(load("sft", "epochs=4")).steps == 12
    assert plan_supervised(load("sft", "samples_per_step=100")).steps == 1
    assert plan_supervised(load("sft", "steps=7")).steps == 7


def test_held_out_rows_are_never_trained_on(load: Any) -> None:
    material = plan_supervised(load("sft", "evaluation.share=0.5")).material
    assert material.held_out is not None
    assert material.train.rows() + material.held_out.rows() == 6
    train, held_out = (
        {tuple(sample.tokens.tolist()) for sample in part.samples} for part in (material.train, material.held_out)
    )
    assert not train & held_out


def test_held_out_rows_come_from_a_file_of_their_own(load: Any, tmp_path: Path) -> None:
    file = write(tmp_path, ROWS["sft"][:3], "held_out.jsonl")
    material = plan_supervised(load("sft", f"evaluation.data={file}", "evaluation.limit=2")).material
    assert material.held_out is not None
    assert (material.train.rows(), material.held_out.rows()) == (6, 2)


def test_a_mixture_has_rows_of_every_source(load: Any, tmp_path: Path) -> None:
    one, two = write(tmp_path, ROWS["sft"][:2], "one.jsonl"), write(tmp_path, ROWS["sft"][2:], "two.jsonl")
    config = load("sft").with_keys({"data": {"path": "", "mixture": {str(one): 0.5, str(two): 0.5}}})
    train = plan_supervised(config).material.train
    assert train.sizes == [2, 4]
    order = train.order(seed=0, shuffle=True, position=0)
    assert {next(order) for _ in range(100)} == set(range(6))


def make_dataset(lengths: list[int], samples_per_row: int) -> Dataset:
    task = TASKS["preference" if samples_per_row == 2 else "sft"]
    samples = [Sample(torch.arange(length), torch.arange(length) > 0) for length in lengths]
    return Dataset(task, samples, [len(lengths) // samples_per_row], [""], [1.0], {}, [])


def test_taken_samples_weigh_one_minibatch() -> None:
    tokens, pairs = make_dataset([3, 4, 6], 1), make_dataset([3, 4, 6, 5], 2)
    assert [sample.weight for sample in tokens.take([2, 0])] == [1 / 7, 1 / 7]  # masked: 5 and 2
    taken = pairs.take([1, 0])
    assert [sample.length() for sample in taken] == [6, 5, 3, 4]
    assert [sample.weight for sample in taken] == [0.25] * 4


def test_all_that_a_loss_may_ask_of_rows_is_found_once() -> None:
    pairs = make_dataset([3, 4, 6, 5], 2)
    assert [sample.length() for sample in pairs.samples_of([1, 0, 1])] == [3, 4, 6, 5]


def test_the_longest_row_is_the_longest_pair() -> None:
    assert check_longest(make_dataset([3, 4, 6], 1), Budget(6)) == 6
    assert check_longest(make_dataset([3, 4, 6, 5], 2), Budget(11)) == 11


def test_a_row_that_fits_no_pass_is_refused_before_the_start() -> None:
    with pytest.raises(ConfigError, match=r"a row of 6 tokens does not fit .* x model\.context_parallel = 5"):
        check_longest(make_dataset([3, 4, 6], 1), Budget(5))
    with pytest.raises(ConfigError, match=r"a row of 11 tokens \(a whole pair\) does not fit"):
        check_longest(make_dataset([3, 4, 6, 5], 2), Budget(10))


LONG_PAIR = [{"prompt": "1+1=", "chosen": "2" * 20, "rejected": "3"}]


def test_padding_counts_when_a_pair_is_held_against_the_limit(load: Any) -> None:
    """Padded, 25 and 6 tokens are 50: a plan that accepts them breaks at the first step."""
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        plan_supervised(load("dpo", "training.micro_batch_tokens=40", "training.packing=false", rows=LONG_PAIR))


def test_held_out_pairs_are_held_against_the_limit_too(load: Any, tmp_path: Path) -> None:
    long = write(tmp_path, [LONG_PAIR[0] | {"rejected": "3" * 20}], "held_out.jsonl")
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        plan_supervised(load("dpo", "training.micro_batch_tokens=40", f"evaluation.data={long}"))


def test_a_rank_can_load_the_teacher_of_its_students_run(load: Any, model_folder: Path) -> None:
    """The goal travels to another process; a task without one sends none."""
    (spec,) = worker_specs(plan_supervised(load("distill", "distill.temperature=2")))
    assert spec.distillation_target is not None
    student = load_model(spec.model, torch.float32, packed=True)
    teacher = pickle.loads(pickle.dumps(spec)).distillation_target(student, torch.float32, True)
    assert teacher.config.temperature == 2.0
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    assert worker_specs(plan_supervised(load("sft")))[0].distillation_target is None


def test_a_missing_teacher_is_asked_for(load: Any) -> None:
    with pytest.raises(ConfigError, match=r"distill\.teacher is empty"):
        plan_supervised(load("distill", "distill.teacher="))


def test_the_numbers_before_the_first_step_are_one_line() -> None:
    assert describe_start({"evaluation/loss": 0.5, "evaluation/accuracy": 0.25}) == (
        "start      evaluation/loss 0.5000  evaluation/accuracy 0.2500"
    )


def test_material_is_the_same_every_time(load: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    config = load("kto", "evaluation.share=0.3", "max_tokens=32")
    chat = ChatFormat(tokenizer, True, [tokenizer.eos_token_id])
    first, second = load_material(config, chat, 32), load_material(config, chat, 32)
    assert (first.train.rows(), len(first.train.samples_of(range(4)))) == (4, 8)
    pairs = zip(*(one.train.samples_of(range(4)) for one in (first, second)), strict=True)
    assert all(torch.equal(one.tokens, two.tokens) for one, two in pairs)


def test_counts_of_all_sources_are_added(load: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    config = load("sft", "max_tokens=5", "data.too_long=truncate")
    rows = open_source(str(write(tmp_path, ROWS["sft"], "again.jsonl")), "data.path")
    chat = ChatFormat(tokenizer, True, [tokenizer.eos_token_id])
    dataset, records = encode_sources([rows, rows[:2]], [0.5, 0.5], config, chat, 5)
    assert len(records) == 8
    assert dataset.counts["rows"] == dataset.counts["truncated"] == 8
    assert len(dataset.formats) == 2


def test_rows_may_have_what_a_pass_of_all_ring_ranks_holds(load: Any) -> None:
    asked = load("sft", "max_tokens=200", "training.micro_batch_tokens=100")
    assert planning.budget_of(asked).tokens == 100
    assert (
        planning.budget_of(
            asked.with_keys({"runtime": "ray", "training": {"engine": "deepspeed"}, "model": {"context_parallel": 2}})
        ).tokens
        == 200
    )
    assert plan_supervised(load("sft", "max_tokens=60", "training.micro_batch_tokens=6")).longest == 6
    with pytest.raises(ConfigError, match=r"a row of 6 tokens does not fit .*= 5\): raise it, or lower max_tokens"):
        plan_supervised(load("sft", "max_tokens=60", "training.micro_batch_tokens=5"))


BIG = ModelFacts(
    10**9,
    context=4096,
    heads=8,
    key_heads=8,
    head_size=64,
    vocabulary=1000,
    hidden_size=2048,
    layers=16,
    intermediate_size=8192,
)


@pytest.fixture
def elsewhere(load: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plan for a model of a billion parameters on a machine with so much memory."""

    def make(verb: str, memory_gib: float, *overrides: str) -> SupervisedPlan:
        there = Machine(cpus=2, memory_bytes=int(memory_gib * 2**30), gpus=0, gpu_bytes=0)
        monkeypatch.setattr(planning, "machine_at_hand", lambda: there)
        monkeypatch.setattr(planning, "check_model", lambda *given, **named: BIG)
        return plan_supervised(load(verb, "samples_per_step=10000", *overrides))

    return make


def test_passes_follow_memory_and_are_said(elsewhere: Any) -> None:
    plans = {gib: elsewhere("sft", gib) for gib in (200, 32, 20)}
    sizes = {gib: plan.config.training.micro_batch_tokens for gib, plan in plans.items()}
    assert sizes[200] == 4096 > sizes[32]
    assert [plan.config.model.gradient_checkpointing for plan in plans.values()] == [False, False, True]
    assert f"torch rank, micro-batches of up to {sizes[20]} tokens, gradient checkpointing" in describe(plans[20])
    words = [f"training.micro_batch_tokens={sizes[20]}", "model.gradient_checkpointing=true", "max_tokens=4096"]
    resumed = elsewhere("sft", 200, *words).config
    assert (resumed.training.micro_batch_tokens, resumed.model.gradient_checkpointing) == (sizes[20], True)


def test_every_rank_takes_memory(elsewhere: Any) -> None:
    one, three = (
        elsewhere("sft", 60, "runtime=ray", "training.engine=deepspeed", f"training.ranks={n}") for n in (1, 3)
    )
    assert three.config.training.micro_batch_tokens < one.config.training.micro_batch_tokens


def test_rows_can_be_looked_at_where_the_model_cannot_be_trained(
    elsewhere: Any, load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="needs about"):
        elsewhere("sft", 2)
    assert show_rows(load("sft"), 1) == 0
    assert "micro-batches as memory allows" in capsys.readouterr().out


def test_a_teacher_takes_memory_too(elsewhere: Any) -> None:
    elsewhere("sft", 18)
    with pytest.raises(ConfigError, match=r"1 x model [\d.]+, 1 x teacher [\d.]+\), 18.0 GiB are free here"):
        elsewhere("distill", 18)


def test_an_offline_plan_warns_of_rates_idle_keys_and_crowded_cores(elsewhere: Any) -> None:
    words = ["training.learning_rate=1e-9", "training.decay_share=0.5"]
    keys = [one.key for one in elsewhere("dpo", 200, *words).findings if one.code != "no_chat_template"]
    assert keys == ["training.learning_rate", "training.decay_share"]
    crowded = elsewhere("dpo", 900, "runtime=ray", "training.ranks=3", "training.learning_rate=5e-6")
    assert describe(crowded).splitlines()[-1].startswith("warning: training.ranks=3: 3 processes on 2 CPU cores")
    assert crowded.findings[-1].code == "crowded_cores"


def test_the_plan_tells_of_a_template_that_is_not_there_and_takes_one(load: Any, tmp_path: Path) -> None:
    assert [one.code for one in plan_supervised(load("dpo")).findings] == ["no_chat_template"]
    assert plan_supervised(load("sft", rows=[{"text": "plain"}])).findings == []
    file = tmp_path / "chat.jinja"
    file.write_text(TOOL_TEMPLATE)
    plan = plan_supervised(load("dpo", f"data.chat_template={file}"))
    assert "template " not in describe(plan)
    assert plan.chat.tokenizer.decode(plan.material.train.samples[0].tokens) == "<user>0+1=</s>\n<assistant>1</s>"
    assert [spec.chat_template for spec in worker_specs(plan)] == [TOOL_TEMPLATE]
    file.write_text("{{ greeting }}" + TOOL_TEMPLATE)
    plan = plan_supervised(load("dpo", f"data.chat_template={file}", "data.chat_template_kwargs={greeting: hi}"))
    assert plan.chat.tokenizer.decode(plan.material.train.samples[0].tokens) == "hi<user>0+1=</s>\n<assistant>1</s>"
    with pytest.raises(
        ConfigError, match=r"data\.chat_template_kwargs={'greeting': 'hi'}: there is no chat template to read them"
    ):
        plan_supervised(load("dpo", "data.chat_template=never", "data.chat_template_kwargs={greeting: hi}"))


def test_a_preview_shows_calls_and_tools(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TOOL_TEMPLATE)
    rows = [{"messages": TOOL_TALK[:2], "tools": TOOLS}]
    assert show_rows(load("sft", f"data.chat_template={file}", rows=rows), 1) == 0
    shown = '<tools>add;</s>\n<user>1+1=</s>\n<assistant>⟦<call>add{"a": 1, "b": 1}</s>⟧'
    assert shown in capsys.readouterr().out
