"""The samples of an offline run: read, checked and tokenized before any model is loaded."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.base import ConfigError
from trueline.config.supervised import SupervisedConfig
from trueline.data.batching import Budget, pass_tokens
from trueline.data.chat import ChatFormat
from trueline.data.encoding import Encodings
from trueline.data.loader import Mixture, Order, digest_rows, make_order, split_rows
from trueline.data.sources import Located, open_source
from trueline.data.types import Sample
from trueline.offline.tasks import TASKS, Records, Task


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows of `task.together` neighbouring samples, in one or several sources laid one after the other."""

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
        together = self.task.together
        return [self.samples[row * together + at] for row in rows for at in range(together)]


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
        held_out = [open_source(evaluation.data, "evaluation.data")]
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
    for rows in sources:
        records, described = task.read(rows, config)
        everything += records
        encodings.append(task.encode(records, chat, config, max_tokens))
        formats.append(described)
    counts = {name: sum(one.counts.get(name, 0) for one in encodings) for one in encodings for name in one.counts}
    dataset = Dataset(
        task=task,
        samples=[sample for one in encodings for sample in one.samples],
        sizes=[len(one.samples) // task.together for one in encodings],
        digests=[digest_rows(located.row for located in rows) for rows in sources],
        probabilities=probabilities,
        counts=counts,
        formats=formats,
    )
    return dataset, everything


def check_longest(dataset: Dataset, budget: Budget) -> int:
    """Return the most tokens that must go into one pass together, or refuse a row that fits none."""
    together, limit = dataset.task.together, budget.tokens
    lengths = [sample.length() for sample in dataset.samples]
    units = [lengths[start : start + together] for start in range(0, len(lengths), together)]
    longest = max(pass_tokens(unit, budget) for unit in units)
    if budget.samples is not None and budget.samples < together:
        raise ConfigError(f"training.micro_batch_samples={budget.samples} separates a pair: set it to 2 or more")
    if longest > limit:
        raise ConfigError(
            f"a row of {longest} tokens{' (both answers of a pair)' if together == 2 else ''} does not fit into one "
            f"pass of training.micro_batch_tokens x model.context_parallel = {limit}: raise it, or lower max_tokens"
        )
    return longest
