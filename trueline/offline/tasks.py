"""Offline tasks, one row each: how rows become samples, and which loss is taken of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.config.preference import WITHOUT_REFERENCE
from trueline.config.supervised import (
    DistillRunConfig,
    KTORunConfig,
    PreferenceRunConfig,
    ProcessRewardRunConfig,
    SftConfig,
    SupervisedConfig,
)
from trueline.data.chat import ChatFormat
from trueline.data.encoding import Encodings, encode_conversations, encode_pairs, encode_rated, encode_steps
from trueline.data.formats import check_ratings, read_conversations, read_pairs, read_rated, read_steps
from trueline.data.sources import Located
from trueline.models.divergence import load_teacher

Records = list[Any]


def nothing(given: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Task:
    read: Callable[[list[Located], Any], tuple[Records, str]]  # and what format the rows have
    encode: Callable[[Records, ChatFormat, Any, int], Encodings]  # of so many tokens at most
    loss: str
    check: Callable[[Records], None] = nothing  # of all that is trained on
    section: str = ""  # of the configuration, that the loss reads
    head: str = "language"
    together: int = 1  # neighbouring samples that make one row
    per_sequence: bool = False
    reference: Callable[[Any], bool] = lambda config: False  # whether log-probs of the starting model are needed
    goal: Callable[[Any], Callable[..., Any] | None] = nothing  # loads what is learnt in place of tokens

    def section_of(self, config: SupervisedConfig) -> Any:
        return dict(config)[self.section] if self.section else None


def read_plain(rows: list[Located], config: SupervisedConfig) -> tuple[Records, str]:
    return read_conversations(rows, config.data)


def encode_plain(records: Records, chat: ChatFormat, config: SftConfig, limit: int) -> Encodings:
    return encode_conversations(records, chat, limit, config.learn, config.data.too_long)


def encode_preferences(records: Records, chat: ChatFormat, config: SupervisedConfig, limit: int) -> Encodings:
    return encode_pairs(records, chat, limit, config.data.too_long)


def encode_verdicts(records: Records, chat: ChatFormat, config: KTORunConfig, limit: int) -> Encodings:
    return encode_rated(records, chat, limit, config.data.too_long, config.samples_per_step)


def encode_process(records: Records, chat: ChatFormat, config: ProcessRewardRunConfig, limit: int) -> Encodings:
    separator = config.data.step_separator.replace("\\n", "\n")
    if not separator:
        raise ConfigError("data.step_separator is empty: name the text that ends a step, for replies are cut there")
    return encode_steps(records, chat, limit, config.data.too_long, separator)


def preference_reference(config: PreferenceRunConfig) -> bool:
    return config.preference.loss not in WITHOUT_REFERENCE


def teacher_model(config: DistillRunConfig) -> ModelConfig:
    path, trusted = config.distill.teacher, config.model.trust_remote_code
    return ModelConfig(path=path, dtype=config.model.dtype, trust_remote_code=trusted)


def teacher_goal(config: DistillRunConfig) -> Callable[..., Any]:
    return partial(load_teacher, config.distill, teacher_model(config))


TASKS: dict[str, Task] = {
    "sft": Task(read_plain, encode_plain, "sft"),
    "distill": Task(read_plain, encode_plain, "distill", section="distill", goal=teacher_goal),
    "preference": Task(
        lambda rows, config: read_pairs(rows, config.data),
        encode_preferences,
        "preference",
        section="preference",
        together=2,
        per_sequence=True,
        reference=preference_reference,
    ),
    "kto": Task(
        lambda rows, config: read_rated(rows, config.data),
        encode_verdicts,
        "kto",
        check=check_ratings,
        section="kto",
        per_sequence=True,
        reference=lambda config: True,
    ),
    "rm": Task(
        lambda rows, config: read_pairs(rows, config.data, config.reward_model.margin_column),
        encode_preferences,
        "reward_model",
        section="reward_model",
        head="reward",
        together=2,
        per_sequence=True,
    ),
    "prm": Task(lambda rows, config: read_steps(rows, config.data), encode_process, "process_reward", head="steps"),
}
