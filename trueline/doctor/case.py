"""The input of the checks: the configuration, the plan as far as it goes, the tokenizer and the rows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.config.reward import RewardConfig
from trueline.config.rl import EvaluationConfig, RLConfig
from trueline.config.run import RunConfig
from trueline.config.sampling import EvalConfig, SamplingConfig
from trueline.config.supervised import SupervisedConfig
from trueline.data.chat import ChatFormat
from trueline.data.formats import Conversation, Document, Pair, Rated, StepRated
from trueline.data.loader import split_rows
from trueline.data.messages import Message, Tool, content_of
from trueline.data.pictures import Picture
from trueline.data.prompts import sample_of
from trueline.data.rows import Located
from trueline.data.sources import open_source
from trueline.data.types import Prompt
from trueline.models.loading import ModelFacts, check_model, load_chat
from trueline.monitoring.findings import Finding
from trueline.plan.inputs import Reading, held_out_prompts, training_prompts
from trueline.plan.rewards import Trial, check_rewards
from trueline.plan.tasks import TASKS

LOOKED_AT = 200  # rows, by checks that take their time
Kind = TypeVar("Kind")
Record = Prompt | Conversation | Document | Pair | Rated | StepRated


@dataclass(slots=True, eq=False)
class DataRow:
    """A row of any task: the prompt, the completions in it, and the label that a reward compares."""

    asked: list[Message]
    completions: tuple[str, ...]
    place: str
    label: Any = None
    tools: tuple[Tool, ...] = ()
    pictures: tuple[Picture, ...] = ()
    question: int = field(init=False)  # equal in rows with the same prompt; of a text without a prompt, all of it

    def __post_init__(self) -> None:
        # A hash, because there may be many rows.
        self.question = hash((repr(self.asked or self.completions), self.pictures))

    def text(self) -> str:
        return content_of(self.asked[-1]) if self.asked else ""


@dataclass(frozen=True, slots=True)
class Case:
    """A run to examine; what could not be read is absent, and the plan's refusal has the reason."""

    config: RunConfig  # as planned, or as given if the plan is refused
    facts: ModelFacts | None
    chat: ChatFormat | None
    rows: list[DataRow]
    held_out: list[DataRow]
    trials: dict[str, Trial] = field(default_factory=dict)  # of the reward functions, by their names
    total: int | None = None  # rows to train on, where those above are a sample

    @property
    def model(self) -> ModelConfig:
        return self.section("model", ModelConfig) or ModelConfig()

    @property
    def training(self) -> TrainingConfig | None:
        return self.section("training", TrainingConfig)

    @property
    def rewards(self) -> RewardConfig:
        return self.section("reward", RewardConfig) or RewardConfig()

    def section(self, name: str, kind: type[Kind]) -> Kind | None:
        found = dict(self.config).get(name)
        return found if isinstance(found, kind) else None


Check = Callable[[Case], Iterable[Finding]]


def case_of(config: RunConfig, reading: Reading) -> Case:
    rows, held_out = rows_of(reading.rows), rows_of(reading.held_out)
    return Case(config, reading.facts, reading.chat, rows, held_out, reading.trials, reading.total)


def gather(config: RunConfig) -> Case:
    """Read what can be read without loading weights, for a run whose plan is refused."""
    assert isinstance(config, RLConfig | SamplingConfig | SupervisedConfig)  # no other kind of run is there
    model, head = config.model, TASKS[config.task].head if isinstance(config, SupervisedConfig) else "language"
    facts = readable(lambda: check_model(model, head, quantized=isinstance(config, SamplingConfig)))
    chat = readable(lambda: load_chat(model, config.data.chat_template)) if facts else None
    if isinstance(config, SupervisedConfig):
        records, tested = readable(lambda: supervised_records(config)) or ([], [])
        return Case(config, facts, chat, rows_of(records), rows_of(tested))
    prompts, held_out = readable(lambda: prompts_of(config)) or ([], [])
    asked = readable(lambda: check_rewards(config.reward, [prompts], config.data, required=False)) if prompts else None
    return Case(config, facts, chat, rows_of(prompts), rows_of(held_out), asked.trials if asked else {})


def readable(read: Callable[[], Kind]) -> Kind | None:
    try:
        return read()
    except ConfigError:
        return None


def prompts_of(config: RLConfig | SamplingConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts, and the held-out ones; `eval` samples the latter."""
    evaluation = dict(config).get("evaluation")
    held_out = held_out_prompts(config.data, evaluation) if isinstance(evaluation, EvaluationConfig) else {}
    tested = [one for prompts in held_out.values() for one in prompts]
    if isinstance(config, EvalConfig):
        return tested, []
    return [one for prompts in training_prompts(config.data).values() for one in sample_of(prompts)], tested


def supervised_records(config: SupervisedConfig) -> tuple[list[Record], list[Record]]:
    held, key = config.evaluation, config.data.source_key()
    parts = [split_rows(open_source(path, key), held.share, held.by, config.seed) for path in config.data.sources()]
    tested = [list(open_source(held.data, "evaluation.data"))] if held.data else [part for _, part in parts if part]
    return read_records([part for part, _ in parts], config), read_records(tested, config)


def read_records(parts: Iterable[list[Located]], config: SupervisedConfig) -> list[Record]:
    return [record for part in parts for record in TASKS[config.task].read(part, config)[0]]


def rows_of(records: Iterable[Record]) -> list[DataRow]:
    return [row_of(record) for record in records]


def row_of(record: Record) -> DataRow:
    match record:
        case Prompt(messages=messages, label=label, tools=tools):
            return DataRow(messages, (), record.place(), label, tuple(tools), record.pictures)
        case Document(text, place):
            return DataRow([], (text,), place)
        case Conversation(messages, place, tools):
            said = (content_of(messages[-1]),)
            return DataRow(messages[:-1], said, place, tools=tuple(tools), pictures=record.pictures)
        case Pair(prompt, chosen, rejected):
            texts = [join_contents(chosen), join_contents(rejected)]
        case Rated(prompt, completion):
            texts = [join_contents(completion)]
        case StepRated(prompt, steps):
            texts = ["\n".join(steps)]
    return DataRow(prompt, tuple(texts), record.place, tools=tuple(record.tools), pictures=record.pictures)


def join_contents(messages: list[Message]) -> str:
    return "\n".join(content_of(message) for message in messages)
