"""Offline tasks: how rows become samples, which loss they have, and the samples of a run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import Any

from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig
from trueline.config.supervised import WITHOUT_REFERENCE, DistillRunConfig, SupervisedConfig
from trueline.data.batching import Budget, pass_tokens
from trueline.data.chat import ChatFormat
from trueline.data.encoding import Encodings, encode_conversations, encode_pairs, encode_rated, encode_steps
from trueline.data.formats import Document, check_ratings, read_conversations, read_pairs, read_rated, read_steps
from trueline.data.loader import Mixture, Order, digest_rows, make_order, split_rows
from trueline.data.pictures import Picture
from trueline.data.rows import Located
from trueline.data.sources import open_source
from trueline.data.types import Sample
from trueline.models.head import load_teacher
from trueline.models.loading import load_settings
from trueline.models.vision import blindness
from trueline.plan.inputs import blind

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
    samples_per_row: int = 1  # neighbouring samples that make one row
    per_sequence: bool = False
    reference: Callable[[Any], bool] = lambda config: False  # whether log-probs of the starting model are needed
    distillation_target: Callable[[Any], Callable[..., Any] | None] = nothing  # loads what is learnt in place of tokens

    def section_of(self, config: SupervisedConfig) -> Any:
        return dict(config)[self.section] if self.section else None


def encode_process(records: Records, chat: ChatFormat, config: Any, limit: int) -> Encodings:
    if not (separator := config.data.step_separator.replace("\\n", "\n")):
        raise ConfigError(
            "data.step_separator is empty: name the text that ends a step, for replies are cut there",
            key="data.step_separator",
        )
    return encode_steps(records, chat, limit, config.data.too_long, separator)


def teacher_model(config: DistillRunConfig) -> ModelConfig:
    path, trusted = config.distill.teacher, config.model.trust_remote_code
    return ModelConfig(path=path, dtype=config.model.dtype, trust_remote_code=trusted)


SFT = Task(
    read=lambda rows, config: read_conversations(rows, config.data),
    encode=lambda records, chat, config, limit: encode_conversations(
        records, chat, limit, config.learn, config.data.too_long
    ),
    loss="sft",
)
PREFERENCE = Task(
    read=lambda rows, config: read_pairs(rows, config.data),
    encode=lambda records, chat, config, limit: encode_pairs(records, chat, limit, config.data.too_long),
    loss="preference",
    section="preference",
    samples_per_row=2,
    per_sequence=True,
    reference=lambda config: config.preference.loss not in WITHOUT_REFERENCE,
)
TASKS: dict[str, Task] = {
    "sft": SFT,
    "distill": replace(
        SFT,
        loss="distill",
        section="distill",
        distillation_target=lambda config: partial(load_teacher, config.distill, teacher_model(config)),
    ),
    "preference": PREFERENCE,
    "kto": Task(
        read=lambda rows, config: read_rated(rows, config.data),
        encode=lambda records, chat, config, limit: encode_rated(
            records, chat, limit, config.data.too_long, config.samples_per_step
        ),
        loss="kto",
        check=check_ratings,
        section="kto",
        per_sequence=True,
        reference=lambda config: True,
    ),
    "rm": replace(
        PREFERENCE,
        read=lambda rows, config: read_pairs(rows, config.data, config.reward_model.margin_column),
        loss="reward_model",
        section="reward_model",
        head="reward",
        reference=lambda config: False,
    ),
    "prm": Task(lambda rows, config: read_steps(rows, config.data), encode_process, "process_reward", head="steps"),
}


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows of `task.samples_per_row` neighbouring samples, of one or several sources one after the other."""

    task: Task
    samples: list[Sample]
    sizes: list[int]  # rows of each source
    digests: list[str]  # of each source
    probabilities: list[float]
    counts: dict[str, int]
    formats: list[str]

    def rows(self) -> int:
        return sum(self.sizes)

    def order(self, seed: int, shuffle: bool, position: int) -> Order | Mixture:
        return make_order(self.sizes, self.probabilities, seed, shuffle, position)

    def take(self, rows: list[int]) -> list[Sample]:
        """Return the samples of these rows, with their weights in a minibatch of just them."""
        samples = self._at(rows)
        set_weights(samples, "sequence_sum" if self.task.per_sequence else "token_mean", budget=0)
        return samples

    def samples_of(self, rows: Iterable[int]) -> list[Sample]:
        """Return every sample that a loss may read for these rows, their companions among them."""
        samples = self._at(sorted(set(rows)))
        return samples + [sample.companion for sample in samples if sample.companion is not None]

    def _at(self, rows: list[int]) -> list[Sample]:
        samples_per_row = self.task.samples_per_row
        return [self.samples[row * samples_per_row + at] for row in rows for at in range(samples_per_row)]


@dataclass(frozen=True, slots=True)
class Material:
    train: Dataset
    held_out: Dataset | None
    records: Records = field(default_factory=list)  # that were trained on, and those held out, as they were read
    held_out_records: Records = field(default_factory=list)


def load_material(config: SupervisedConfig, chat: ChatFormat, max_tokens: int) -> Material:
    sources, evaluation = config.data.sources(), config.evaluation
    opened = [open_source(path, config.data.source_key()) for path in sources]
    parts = [split_rows(rows, evaluation.share, evaluation.by, config.seed) for rows in opened]
    train, records = encode_sources([part for part, _ in parts], list(sources.values()), config, chat, max_tokens)
    train.task.check(records)
    held_out = [part for _, part in parts if part]
    if evaluation.data:
        held_out = [list(open_source(evaluation.data, "evaluation.data"))]
    if not held_out:
        return Material(train, None, records)
    shares = [part[: evaluation.limit] for part in held_out]
    try:
        tested, kept_apart = encode_sources(shares, [1.0] * len(shares), config, chat, max_tokens)
    except ConfigError as error:
        raise ConfigError(f"held-out rows (evaluation.*): {error}") from error
    return Material(train, tested, records, kept_apart)


def encode_sources(
    sources: list[list[Located]],
    probabilities: list[float],
    config: SupervisedConfig,
    chat: ChatFormat,
    max_tokens: int,
) -> tuple[Dataset, Records]:
    """Read and encode the sources; return the dataset, and the records that it was made of."""
    task = TASKS[config.task]
    everything: Records = []
    encodings: list[Encodings] = []
    formats: list[str] = []
    digests: list[str] = []
    for rows in sources:
        records, described = task.read(rows, config)
        check_pictures(records, chat, config)
        everything += records
        encodings.append(task.encode(records, chat, config, max_tokens))
        formats.append(described)
        # The name of a picture's file does not tell what it shows.
        seen = ({"picture": sha256(picture.data).hexdigest()} for picture in pictures_of(records))
        digests.append(digest_rows(chain((located.row for located in rows), seen)))
    counts = {name: sum(one.counts.get(name, 0) for one in encodings) for one in encodings for name in one.counts}
    if shown := sum(bool(pictures_of([record])) for record in everything):
        counts["with pictures"] = shown
    dataset = Dataset(
        task=task,
        samples=[sample for one in encodings for sample in one.samples],
        sizes=[len(one.samples) // task.samples_per_row for one in encodings],
        digests=digests,
        probabilities=probabilities,
        counts=counts,
        formats=formats,
    )
    return dataset, everything


def pictures_of(records: Records) -> list[Picture]:
    return [picture for record in records if not isinstance(record, Document) for picture in record.pictures]


def check_pictures(records: Records, chat: ChatFormat, config: SupervisedConfig) -> None:
    """Refuse rows with pictures that the model, or the task with it, does not read."""
    if chat.vision is not None or not pictures_of(records):
        return
    place = next(record.place for record in records if pictures_of([record]))
    why = blindness(load_settings(config.model)["family"])
    raise ConfigError(blind(place, f"model.path={config.model.path} {why}"))


def check_longest(dataset: Dataset, budget: Budget) -> int:
    """Return the most tokens that must go into one pass together, or refuse a row that fits none."""
    samples_per_row, limit = dataset.task.samples_per_row, budget.tokens
    lengths = [sample.length() for sample in dataset.samples]
    units = [lengths[start : start + samples_per_row] for start in range(0, len(lengths), samples_per_row)]
    longest = max(pass_tokens(unit, budget) for unit in units)
    if budget.samples is not None and budget.samples < samples_per_row:
        raise ConfigError(f"training.micro_batch_samples={budget.samples} separates a pair: set it to 2 or more")
    if longest > limit:
        raise ConfigError(
            f"a row of {longest} tokens{' (a whole pair)' if samples_per_row == 2 else ''} does not fit into "
            f"one pass (training.micro_batch_tokens x model.context_parallel = {limit}): raise it, or lower max_tokens"
        )
    return longest
