"""Checks of numbers: batches, steps, learning rate, temperature and lengths."""

import math
from collections.abc import Iterator

from trueline.config.rl import RLConfig
from trueline.config.sampling import RoundsConfig
from trueline.config.supervised import SupervisedConfig
from trueline.doctor.case import Case
from trueline.monitoring import limits
from trueline.monitoring.findings import BAD, WATCH, Finding
from trueline.plan.resolve import rate_findings

LOOKED_AT = 200  # rows


def uneven_ranks(case: Case) -> Iterator[Finding]:
    """Find minibatches that ranks cannot share evenly."""
    drawn, key, each, parts = batch_of(case)
    batch = drawn * each // parts
    places = ((case.training.ranks if case.training else None) or 1) // case.model.width()
    if not batch or places < 2 or batch % places == 0:
        return
    least = parts * places // math.gcd(each, parts * places)
    level, waiting = (BAD, "some ranks never work") if batch < places else (WATCH, "ranks wait for each other")
    what = f"an optimizer step has {batch} sequences for {places} ranks: {waiting}"
    yield Finding(level, "uneven_ranks", what, f"set {key} to a multiple of {least}", key)


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
    if rows and steps and steps * drawn > limits.MANY_EPOCHS * rows:
        what = f"{steps} steps of {drawn} rows are {steps * drawn / rows:.0f} epochs over {rows} rows"
        yield Finding(WATCH, "many_epochs", what, "the model memorises these rows", "steps")
    if isinstance(config, RLConfig) and 0 < rows < drawn:
        what = f"a step samples {drawn} prompts, and there are {rows}"
        yield Finding(WATCH, "few_prompts", what, "each step repeats its prompts", "prompts_per_step")


def learning_rate(case: Case) -> Iterator[Finding]:
    if case.training is None or case.facts is None:
        return
    kind = case.config.task if isinstance(case.config, SupervisedConfig) else "policy"
    if isinstance(case.config, RoundsConfig):
        kind = case.config.trained.task
    yield from rate_findings(case.facts.parameters, kind, case.model, case.training)


def warm_up(case: Case) -> Iterator[Finding]:
    updates = updates_of(case)
    warming = case.training.warmup_steps if case.training else 0
    if updates and warming >= updates:
        what = f"training.warmup_steps={warming} of {updates} optimizer steps"
        yield Finding(BAD, "endless_warmup", what, "the learning rate never reaches its peak", "training.warmup_steps")


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
    value, (low, high) = case.config.rollout.temperature, limits.TEMPERATURES
    if not low <= value <= high:
        why = "completions hardly differ and teach little" if value < low else "completions are noise"
        yield Finding(WATCH, "temperature", f"rollout.temperature={value:g} is far from 1", why, "rollout.temperature")


def short_completions(case: Case) -> Iterator[Finding]:
    """Forecast truncation from the lengths of labels, which a reply has to contain."""
    limit = case.rollout.max_new_tokens if case.rollout else None
    tested = any(part.function == "code" for part in case.rewards.named_parts().values())  # whose labels are no replies
    if case.chat is None or limit is None or tested:
        return
    labels = [str(row.label) for row in case.rows[:LOOKED_AT] if row.label is not None]
    long = sum(len(case.chat.text_tokens(label)) > limit for label in labels)
    if long > limits.LONG_ROWS.watch * len(labels):
        what = f"{long} of {len(labels)} labels checked are longer than rollout.max_new_tokens={limit}"
        level = BAD if long > limits.LONG_ROWS.bad * len(labels) else WATCH
        why = "replies as long as these would be truncated"
        yield Finding(level, "short_completions", what, why, "rollout.max_new_tokens")


def long_rows(case: Case) -> Iterator[Finding]:
    """Forecast how many given rows are truncated or dropped."""
    config = case.config
    if not isinstance(config, SupervisedConfig) or case.chat is None or config.max_tokens is None:
        return
    rows = case.rows[:LOOKED_AT]
    texts = ["".join((*(str(part.get("content")) for part in row.asked), *row.completions[:1])) for row in rows]
    long, looked_at = sum(len(case.chat.text_tokens(text)) > config.max_tokens for text in texts), len(texts)
    if long > limits.LONG_ROWS.watch * looked_at and config.data.too_long != "error":
        done = {"drop": "dropped", "truncate": "truncated"}[config.data.too_long]
        what = f"{long} of {looked_at} rows checked have more than max_tokens={config.max_tokens}"
        level = BAD if long > limits.LONG_ROWS.bad * looked_at else WATCH
        yield Finding(level, "long_rows", what, f"they would be {done}", "max_tokens")


CHECKS = (uneven_ranks, epochs, learning_rate, warm_up, temperature, short_completions, long_rows)
