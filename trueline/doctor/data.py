"""Checks of rows: what a run would learn that nobody meant."""

from collections import Counter
from collections.abc import Iterator

from trueline.config.environment import EnvironmentConfig
from trueline.config.supervised import SupervisedConfig
from trueline.doctor.case import Case, Row
from trueline.doctor.findings import Finding, share

LONG_LABEL = 8  # characters that hardly stand in a prompt by chance
MANY = 0.5  # share of the rows


def repeated_rows(case: Case) -> Iterator[Finding]:
    counts = Counter((row.question, row.answers) for row in case.rows)
    repeated = sum(count - 1 for count in counts.values())
    if repeated:
        first = next(row for row in case.rows if counts[row.question, row.answers] > 1)
        why = f"they are learnt more often than the others; one is {first.place}"
        yield Finding("watch", f"duplicates: {share(repeated, len(case.rows))} stand there before", why, path_key(case))


def contradictions(case: Case) -> Iterator[Finding]:
    """Find prompts that several rows label in different ways; an environment may well set one task in many ways."""
    played = case.section("environment", EnvironmentConfig)
    if played is not None and played.plays():
        return
    labels: dict[int, set[str]] = {}
    for row in case.rows:
        labels.setdefault(row.question, set()).add(str(row.label))
    several = [row for row in case.rows if len(labels[row.question]) > 1]
    if several:
        what = f"{share(len(several), len(case.rows))} ask the same and have different labels, e.g. {several[0].place}"
        yield Finding("watch", what, "no answer is right for all of them", path_key(case))


def leaked_rows(case: Case) -> Iterator[Finding]:
    trained = {row.question for row in case.rows}
    leaked = [row for row in case.held_out if row.question in trained]
    if leaked:
        what = f"leak: {share(len(leaked), len(case.held_out))} held out are trained on as well, e.g. {leaked[0].place}"
        split = isinstance(case.config, SupervisedConfig) and case.config.evaluation.share > 0
        key = "evaluation.by" if split else "evaluation.data"
        yield Finding("bad", what, "the evaluation would praise what was learnt by heart", key)


def empty_labels(case: Case) -> Iterator[Finding]:
    empty = [row for row in labelled(case) if not str(row.label).strip() or row.label == []]
    if empty:
        what = f"{share(len(empty), len(case.rows))} have an empty label, e.g. {empty[0].place}"
        yield Finding("bad", what, "a reward that compares with it praises nothing, or everything", "data.label_column")


def equal_labels(case: Case) -> Iterator[Finding]:
    labels = {str(row.label) for row in labelled(case)}
    if len(labels) == 1 and len(case.rows) > 1:
        what = f"all {len(case.rows)} labels are equal: {labels.pop()!r:.40}"
        yield Finding("watch", what, "one constant answer would be right everywhere", "data.label_column")


def mixed_labels(case: Case) -> Iterator[Finding]:
    kinds = Counter(type(row.label).__name__ for row in labelled(case))
    if len(kinds) > 1:
        what = f"labels are of several types: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
        yield Finding("watch", what, "a comparison that suits one type fails on the other", "data.label_column")


def told_labels(case: Case) -> Iterator[Finding]:
    """Find prompts that hold their own answer, where that is too long to stand there by chance."""
    told = [row for row in labelled(case) if len(str(row.label)) >= LONG_LABEL and row.holds(str(row.label))]
    if len(told) > MANY * len(case.rows):
        what = f"{share(len(told), len(case.rows))} have their label in the prompt, e.g. {told[0].place}"
        yield Finding("watch", what, "copying would be enough", "data.prompt_column")


def trailing_space(case: Case) -> Iterator[Finding]:
    """Find prompts whose end joins the reply's first word; behind a template, its marks stand in between."""
    if case.chat is None or case.chat.templated:
        return
    ending = [row for row in case.rows if row.text() != row.text().rstrip()]
    if ending:
        what = f"{share(len(ending), len(case.rows))} have a prompt that ends in white space, e.g. {ending[0].place}"
        why = "most tokenizers join a space to the word behind it, so the model has hardly seen such an end"
        yield Finding("watch", what, why, "data.prompt_column")


def labelled(case: Case) -> list[Row]:
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
    told_labels,
    trailing_space,
)
