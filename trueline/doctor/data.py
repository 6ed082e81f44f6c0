"""Checks of the rows and of the rewards that they get: what a run would learn by mistake, or not at all."""

import sys
from collections import Counter
from collections.abc import Iterator

from trueline.config.environment import EnvironmentConfig
from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.config.rl import RolloutConfig
from trueline.config.supervised import SupervisedConfig
from trueline.data.messages import content_of
from trueline.data.pictures import count_tokens
from trueline.doctor.case import Case, DataRow
from trueline.monitoring import limits
from trueline.monitoring.findings import BAD, FINE, WATCH, Finding
from trueline.plan.rewards import MADE_UP, Trial, label_remark
from trueline.rewards.combined import kind_of
from trueline.rewards.functions import REWARDS

PICTURED = 32  # rows whose pictures are processed


def repeated_rows(case: Case) -> Iterator[Finding]:
    counts = Counter((row.question, row.completions) for row in case.rows)
    if repeated := sum(count - 1 for count in counts.values()):
        first = next(row for row in case.rows if counts[row.question, row.completions] > 1)
        verb = "is a duplicate" if repeated == 1 else "are duplicates"
        what = f"{share_of(case, repeated)} {verb}, e.g. {first.place}"
        yield Finding(WATCH, "repeated_rows", what, "they are learned more often than the others", path_key(case))


def contradictions(case: Case) -> Iterator[Finding]:
    """Find prompts that several rows label in different ways; an environment may well vary one task."""
    played = case.section("environment", EnvironmentConfig)
    if played is not None and played.plays():
        return
    labels: dict[int, set[str]] = {}
    for row in case.rows:
        labels.setdefault(row.question, set()).add(str(row.label))
    if several := [row for row in case.rows if len(labels[row.question]) > 1]:
        what = f"{share_of(case, len(several))} repeat a prompt with another label, e.g. {several[0].place}"
        why = "no completion is right for all of them"
        yield Finding(WATCH, "contradictions", what, why, path_key(case))


def leaked_rows(case: Case) -> Iterator[Finding]:
    trained = {row.question for row in case.rows}
    if leaked := [row for row in case.held_out if row.question in trained]:
        what = f"{share(len(leaked), len(case.held_out))} held out are also trained on, e.g. {leaked[0].place}"
        split = isinstance(case.config, SupervisedConfig) and case.config.evaluation.share > 0
        key = "evaluation.by" if split else "evaluation.data"
        yield Finding(BAD, "leaked_rows", what, "the evaluation would reward memorisation", key)


def empty_labels(case: Case) -> Iterator[Finding]:
    if empty := [row for row in labelled_rows(case) if not str(row.label).strip() or row.label == []]:
        what = f"{share_of(case, len(empty))} have an empty label, e.g. {empty[0].place}"
        why = "a reward that compares with it accepts nothing, or everything"
        yield Finding(BAD, "empty_labels", what, why, "data.label_column")


def equal_labels(case: Case) -> Iterator[Finding]:
    labels = {str(row.label) for row in labelled_rows(case)}
    if len(labels) == 1 and len(case.rows) > 1:
        what = f"all {len(case.rows)} {'sampled ' * bool(case.total)}labels are equal: {labels.pop()!r:.40}"
        yield Finding(WATCH, "equal_labels", what, "one constant reply would always be right", "data.label_column")


def mixed_labels(case: Case) -> Iterator[Finding]:
    kinds = Counter(type(row.label).__name__ for row in labelled_rows(case))
    if len(kinds) > 1:
        what = f"labels have several types: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
        why = "a comparison that suits one type fails on the other"
        yield Finding(WATCH, "mixed_labels", what, why, "data.label_column")


def leaked_labels(case: Case) -> Iterator[Finding]:
    """Find prompts that hold their own label, where that is too long to be there by chance."""
    long = [row for row in labelled_rows(case) if len(str(row.label)) >= limits.LONG_LABEL]
    leaked = [row for row in long if any(str(row.label) in content_of(message) for message in row.asked)]
    if len(leaked) > limits.MANY * len(case.rows):
        what = f"{share_of(case, len(leaked))} have their label in the prompt, e.g. {leaked[0].place}"
        yield Finding(WATCH, "leaked_labels", what, "the model can just copy it", "data.prompt_column")


def trailing_space(case: Case) -> Iterator[Finding]:
    """Find prompts whose end joins the reply's first word; a chat template puts marks in between."""
    if case.chat is None or case.chat.templated:
        return
    if ending := [row for row in case.rows if row.text() != row.text().rstrip()]:
        what = f"{share_of(case, len(ending))} have a prompt that ends in white space, e.g. {ending[0].place}"
        why = "most tokenizers join a space to the next word, so the model has hardly seen such an end"
        yield Finding(WATCH, "trailing_space", what, why, "data.prompt_column")


def picture_tokens(case: Case) -> Iterator[Finding]:
    """Say how many tokens pictures have, and find rows whose context they fill."""
    vision, rows = case.chat.vision if case.chat else None, [row for row in case.rows if row.pictures][:PICTURED]
    if vision is None or not rows:
        return
    counts = [[count_tokens(vision, picture) for picture in row.pictures] for row in rows]
    each = sorted(count for row in counts for count in row)
    what = f"pictures have {each[0]} to {each[-1]} tokens each ({len(each)} checked)"
    yield Finding(FINE, "picture_tokens", what, "", "data.max_pixels")
    key, limit = context_of(case)
    if full := [row for row, own in zip(rows, counts, strict=True) if sum(own) > limits.PICTURES_FILL * limit]:
        part = share(len(full), len(rows), "rows checked")
        what = f"pictures take more than {limits.PICTURES_FILL:.0%} of {key}={limit} in {part}, e.g. {full[0].place}"
        why = "little room is left for words: lower data.max_pixels, use fewer pictures, or raise the limit"
        yield Finding(WATCH, "picture_context", what, why, "data.max_pixels")


def context_of(case: Case) -> tuple[str, int]:
    """Return the limit of a row's tokens, and the key that sets it."""
    if isinstance(case.config, SupervisedConfig) and case.config.max_tokens:
        return "max_tokens", case.config.max_tokens
    rollout = case.section("rollout", RolloutConfig)
    if rollout is not None and rollout.max_prompt_tokens:
        return "rollout.max_prompt_tokens", rollout.max_prompt_tokens
    return "the model's context", case.facts.context if case.facts else sys.maxsize


def share_of(case: Case, part: int) -> str:
    return share(part, len(case.rows), "sampled rows" if case.total else "rows")


def share(part: int, whole: int, rows: str = "rows") -> str:
    percent = f"{100 * part / max(whole, 1):.0f}"
    return f"{part} of {whole} {rows}" + (f" ({percent} %)" if percent != "0" else "")


def labelled_rows(case: Case) -> list[DataRow]:
    return [row for row in case.rows if row.label is not None]


def path_key(case: Case) -> str:
    return "data.mixture" if dict(dict(case.config)["data"])["mixture"] else "data.path"


def check_trials(case: Case) -> Iterator[Finding]:
    """Check what each reward function returned in the few calls that a plan made."""
    config = case.rewards
    if not config.named_parts():
        yield Finding(FINE, "no_reward", "there is no reward function to check")
    for name, part in config.named_parts().items() if case.rows else ():
        key = f"reward.parts.{name}.function" if config.parts else "reward.function"
        if kind_of(part) not in ("function", "rubric"):
            why = "it is not a function, and may cost money"
            yield Finding(FINE, "reward_not_called", f"{part.function} was not called", why, key)
        elif (trial := case.trials.get(name)) is not None and trial.asked:
            yield from reward_findings(trial, part, config, key)


def reward_findings(trial: Trial, part: RewardPartConfig, config: RewardConfig, key: str) -> Iterator[Finding]:
    """Report what is wrong with a reward, the plainest reason alone."""
    values = ", ".join(f"{value:g}" for value in trial.rewards())
    if trial.failures:
        why = "completions whose reward fails are dropped; above reward.max_failure_share the run stops"
        yield Finding(BAD, "reward_trial", f"{part.function} {trial.describe_failures()}", why, key)
    elif trial.slow:
        what = f"{part.function} took {trial.slow:.0f} s for a call, and was not called again"
        yield Finding(FINE, "slow_reward", what, f"reward.timeout_seconds={config.timeout_seconds:g}", key)
    elif trial.reads_turns and not trial.compares:
        return
    elif not trial.compares and len(set(trial.rewards())) == 1 and part.function not in REWARDS:
        what = f"{part.function} scored made-up replies, digits and texts of the data all the same: {values}"
        yield Finding(WATCH, "constant_reward", what, "constant rewards teach nothing", key)
    elif trial.compares:
        yield from label_findings(trial, part, values, key)


def label_findings(trial: Trial, part: RewardPartConfig, values: str, key: str) -> Iterator[Finding]:
    below = [own <= made_up for made_up, own in trial.pairs()]
    shaped = [call for call in trial.others if call.reward > trial.calls[0].reward]
    remark = label_remark(trial.calls[0].prompt.label) if part.function not in REWARDS else ""
    where = f"({values} for {MADE_UP!r} and for the label, in turns)"
    if not any(below) and remark:
        yield Finding(FINE, "label_type", f"{part.function} accepts its own label, although {remark}", "", key)
    elif not any(below):
        return
    elif shaped:
        what = f"{part.function} accepts a label only in this form: {shaped[0].reply!r:.60}"
        yield Finding(WATCH, "reward_form", what, "a prompt that does not ask for that form gets no reward", key)
    elif remark:
        why = f"its own label got no reward {where}"
        yield Finding(BAD, "label_type", f"{part.function}: {remark}", why, "data.label_column")
    elif len(set(trial.rewards())) == 1:
        what = f"{part.function} scored every reply the same {where}"
        yield Finding(BAD, "constant_reward", what, "constant rewards teach nothing", key)
    else:
        what = f"{part.function} scores a row's own label no higher than a made-up reply {where}"
        yield Finding(BAD if all(below) else WATCH, "ignored_label", what, "right replies get no reward", key)


LABEL_CHECKS = (empty_labels, equal_labels, mixed_labels, leaked_labels)
CHECKS = (repeated_rows, contradictions, leaked_rows, *LABEL_CHECKS, trailing_space, picture_tokens)
