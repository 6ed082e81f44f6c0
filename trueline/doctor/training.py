"""Checks of numbers: batches, steps, learning rate, temperature and lengths."""

import math
from collections.abc import Iterator

from trueline.config.rl import RLConfig
from trueline.config.rounds import RoundsConfig
from trueline.config.supervised import SupervisedConfig
from trueline.doctor.case import Case
from trueline.doctor.findings import Finding
from trueline.runs.learning_rate import rate_warnings, suited_rate

MANY_EPOCHS = 100
DIVERGES = 100  # times the rate that suits
TEMPERATURES = (0.5, 1.5)
LOOKED_AT = 200  # rows
FEW, MANY = 0.05, 0.5  # shares of them


def uneven_ranks(case: Case) -> Iterator[Finding]:
    """Find minibatches that ranks cannot share out evenly."""
    drawn, key, each, parts = batch_of(case)
    batch = drawn * each // parts
    places = ((case.training.ranks if case.training else None) or 1) // case.model.width()
    if not batch or places < 2 or batch % places == 0:
        return
    least = parts * places // math.gcd(each, parts * places)
    what = f"{batch} sequences of an optimizer step for {places} ranks: set {key} to a multiple of {least}"
    level, why = ("bad", "some ranks only ever wait") if batch < places else ("watch", "ranks wait for each other")
    yield Finding(level, what, why, key)


def batch_of(case: Case) -> tuple[int, str, int, int]:
    """Return the rows of a step, the key that sets them, the sequences of each, and the parts of a step."""
    config = case.config
    if isinstance(config, RLConfig):
        return config.prompts_per_step, "prompts_per_step", config.algorithm.group_size, config.minibatches
    if isinstance(config, SupervisedConfig):
        return config.samples_per_step, "samples_per_step", 1, 1
    return 0, "", 1, 1


def epochs(case: Case) -> Iterator[Finding]:
    config, rows = case.config, len(case.rows)
    drawn = batch_of(case)[0]
    steps = config.steps if isinstance(config, RLConfig | SupervisedConfig) else None
    if rows and steps and steps * drawn > MANY_EPOCHS * rows:
        what = f"{steps} steps of {drawn} rows are {steps * drawn / rows:.0f} epochs over {rows} rows"
        yield Finding("watch", what, "the model learns these rows by heart", "steps")
    if isinstance(config, RLConfig) and 0 < rows < drawn:
        what = f"a step draws {drawn} prompts, and there are {rows}"
        yield Finding("watch", what, "each step has the same prompts several times", "prompts_per_step")


def learning_rate(case: Case) -> Iterator[Finding]:
    rate = case.training.learning_rate if case.training else None
    if case.training is None or case.facts is None or rate is None:
        return
    size = case.facts.parameters
    kind = case.config.task if isinstance(case.config, SupervisedConfig) else "policy"
    if isinstance(case.config, RoundsConfig):
        kind = case.config.trained.task
    suited = suited_rate(size, kind, adapters=case.model.lora.rank > 0)
    for said in rate_warnings(size, kind, case.model, case.training):
        yield Finding("bad" if rate > DIVERGES * suited else "watch", said, "", "training.learning_rate")


def warm_up(case: Case) -> Iterator[Finding]:
    updates = updates_of(case)
    warming = case.training.warmup_steps if case.training else 0
    if updates and warming >= updates:
        what = f"training.warmup_steps={warming} of {updates} optimizer steps in all"
        yield Finding("bad", what, "the learning rate never reaches its peak", "training.warmup_steps")


def updates_of(case: Case) -> int:
    config = case.config
    if isinstance(config, RLConfig):
        return config.steps * config.minibatches * config.epochs
    if isinstance(config, SupervisedConfig):
        return config.steps or math.ceil(len(case.rows) * config.epochs / config.samples_per_step)
    return 0


def temperature(case: Case) -> Iterator[Finding]:
    if not isinstance(case.config, RLConfig):
        return
    value, (low, high) = case.config.rollout.temperature, TEMPERATURES
    if not low <= value <= high:
        why = "answers are nearly alike and teach little" if value < low else "answers are noise"
        yield Finding("watch", f"rollout.temperature={value:g} is far from 1", why, "rollout.temperature")


def short_answers(case: Case) -> Iterator[Finding]:
    """Forecast truncation by the lengths of labels, which a reply has at least to write."""
    limit = case.rollout.max_new_tokens if case.rollout else None
    tested = any(part.function == "code" for part in case.rewards.named_parts().values())  # whose labels are no replies
    if case.chat is None or limit is None or tested:
        return
    labels = [str(row.label) for row in case.rows[:LOOKED_AT] if row.label is not None]
    long = sum(len(case.chat.text_tokens(label)) > limit for label in labels)
    if long > FEW * len(labels):
        what = f"{long} of {len(labels)} labels looked at are longer than rollout.max_new_tokens={limit}"
        level = "bad" if long > MANY * len(labels) else "watch"
        yield Finding(level, what, "replies as long as these would be cut off", "rollout.max_new_tokens")


def long_rows(case: Case) -> Iterator[Finding]:
    """Forecast what is cut or left out of rows that are given."""
    config = case.config
    if not isinstance(config, SupervisedConfig) or case.chat is None or config.max_tokens is None:
        return
    rows = case.rows[:LOOKED_AT]
    texts = ["".join((*(str(part.get("content")) for part in row.asked), *row.answers[:1])) for row in rows]
    long, looked_at = sum(len(case.chat.text_tokens(text)) > config.max_tokens for text in texts), len(texts)
    if long > FEW * looked_at and config.data.too_long != "error":
        done = {"drop": "left out", "truncate": "cut off"}[config.data.too_long]
        what = f"{long} of {looked_at} rows looked at have more than max_tokens={config.max_tokens}"
        yield Finding("bad" if long > MANY * looked_at else "watch", what, f"they would be {done}", "max_tokens")


CHECKS = (uneven_ranks, epochs, learning_rate, warm_up, temperature, short_answers, long_rows)
