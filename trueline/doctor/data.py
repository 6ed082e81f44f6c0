"""Checks of the rows: what a run would learn by mistake."""

from collections import Counter
from collections.abc import Iterator

from trueline.config.environment import EnvironmentConfig
from trueline.config.supervised import SupervisedConfig
from trueline.doctor.case import Case, DataRow
from trueline.monitoring import limits
from trueline.monitoring.findings import BAD, WATCH, Finding


def repeated_rows(case: Case) -> Iterator[Finding]:
    counts = Counter((row.question, row.completions) for row in case.rows)
    repeated = sum(count - 1 for count in counts.values())
    if repeated:
        first = next(row for row in case.rows if counts[row.question, row.completions] > 1)
        verb = "is a duplicate" if repeated == 1 else "are duplicates"
        what = f"{share(repeated, len(case.rows))} {verb}, e.g. {first.place}"
        yield Finding(WATCH, "repeated_rows", what, "they are learnt more often than the others", path_key(case))


def contradictions(case: Case) -> Iterator[Finding]:
    """Find prompts that several rows label in different ways; an environment may well vary one task."""
    played = case.section("environment", EnvironmentConfig)
    if played is not None and played.plays():
        return
    labels: dict[int, set[str]] = {}
    for row in case.rows:
        labels.setdefault(row.question, set()).add(str(row.label))
    several = [row for row in case.rows if len(labels[row.question]) > 1]
    if several:
        what = f"{share(len(several), len(case.rows))} repeat a prompt with another label, e.g. {several[0].place}"
        why = "no completion is right for all of them"
        yield Finding(WATCH, "contradictions", what, why, path_key(case))


def leaked_rows(case: Case) -> Iterator[Finding]:
    trained = {row.question for row in case.rows}
    leaked = [row for row in case.held_out if row.question in trained]
    if leaked:
        what = f"{share(len(leaked), len(case.held_out))} held out are also trained on, e.g. {leaked[0].place}"
        split = isinstance(case.config, SupervisedConfig) and case.config.evaluation.share > 0
        key = "evaluation.by" if split else "evaluation.data"
        yield Finding(BAD, "leaked_rows", what, "the evaluation would reward memorisation", key)


def empty_labels(case: Case) -> Iterator[Finding]:
    empty = [row for row in labelled_rows(case) if not str(row.label).strip() or row.label == []]
    if empty:
        what = f"{share(len(empty), len(case.rows))} have an empty label, e.g. {empty[0].place}"
        why = "a reward that compares with it accepts nothing, or everything"
        yield Finding(BAD, "empty_labels", what, why, "data.label_column")


def equal_labels(case: Case) -> Iterator[Finding]:
    labels = {str(row.label) for row in labelled_rows(case)}
    if len(labels) == 1 and len(case.rows) > 1:
        what = f"all {len(case.rows)} labels are equal: {labels.pop()!r:.40}"
        yield Finding(WATCH, "equal_labels", what, "one constant reply would always be right", "data.label_column")


def mixed_labels(case: Case) -> Iterator[Finding]:
    kinds = Counter(type(row.label).__name__ for row in labelled_rows(case))
    if len(kinds) > 1:
        what = f"labels have several types: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
        why = "a comparison that suits one type fails on the other"
        yield Finding(WATCH, "mixed_labels", what, why, "data.label_column")


def leaked_labels(case: Case) -> Iterator[Finding]:
    """Find prompts that hold their own label, where that is too long to be there by chance."""
    rows = labelled_rows(case)
    leaked = [row for row in rows if len(str(row.label)) >= limits.LONG_LABEL and row.holds(str(row.label))]
    if len(leaked) > limits.MANY * len(case.rows):
        what = f"{share(len(leaked), len(case.rows))} have their label in the prompt, e.g. {leaked[0].place}"
        yield Finding(WATCH, "leaked_labels", what, "the model can just copy it", "data.prompt_column")


def trailing_space(case: Case) -> Iterator[Finding]:
    """Find prompts whose end joins the reply's first word; a chat template puts marks in between."""
    if case.chat is None or case.chat.templated:
        return
    ending = [row for row in case.rows if row.text() != row.text().rstrip()]
    if ending:
        what = f"{share(len(ending), len(case.rows))} have a prompt that ends in white space, e.g. {ending[0].place}"
        why = "most tokenizers join a space to the next word, so the model has hardly seen such an end"
        yield Finding(WATCH, "trailing_space", what, why, "data.prompt_column")


def share(part: int, whole: int) -> str:
    percent = f"{100 * part / max(whole, 1):.0f}"
    return f"{part} of {whole} rows" + (f" ({percent} %)" if percent != "0" else "")


def labelled_rows(case: Case) -> list[DataRow]:
    return [row for row in case.rows if row.label is not None]


def path_key(case: Case) -> str:
    return "data.mixture" if dict(dict(case.config)["data"])["mixture"] else "data.path"


CHECKS = (
    repeated_rows,
    contradictions,
    leaked_rows,
    empty_labels,
    equal_labels,
    mixed_labels,
    leaked_labels,
    trailing_space,
)
