"""One result, however the work is divided: packed, padded, in passes, over ranks."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from trueline.config.base import ConfigError, Tree, merge
from trueline.models.scorer import ProbeFailure
from trueline.runtime.actors import ActorFailure
from trueline.training.group import ModelGroup
from trueline.verify.comparison import Comparison, Result, compare_all
from trueline.verify.subject import Subject
from trueline.verify.trainers import measure, open_here, open_ranks

Open = Callable[[Tree], ModelGroup]
FAILURES = (ConfigError, ActorFailure)


def training(**keys: object) -> Tree:
    return {"training": keys}


def zero(stage: int) -> Tree:
    return training(engine="deepspeed", deepspeed={"zero_stage": stage})


def with_width(**keys: int) -> Tree:
    return zero(2) | {"model": keys}


HERE: dict[str, Tree] = {  # in this process: what is done -> keys
    "all in one pass": {},
    "three in a pass": training(micro_batch_samples=3),
    "one in a pass": training(micro_batch_samples=1),
    "shared prefixes": training(share_prefixes=True),
    "padded": training(packing=False),
    "padded, three in a pass": training(packing=False, micro_batch_samples=3),
}
EITHER: dict[str, Tree] = {  # packed, if the model can be
    "checkpointing": {"model": {"gradient_checkpointing": True}},
    "short slices of the head": {"model": {"head_chunk_tokens": 7}},
}
OVER_RANKS: dict[str, Tree] = {
    **{f"ZeRO {stage}": zero(stage) for stage in range(4)},
    "FSDP2": training(engine="fsdp2"),
    "FSDP2, weights kept": training(engine="fsdp2", fsdp2={"reshard": False}),
}
SPLIT: dict[str, Tree] = {  # over two ranks
    "context parallel": with_width(context_parallel=2),
    "tensor parallel": with_width(tensor_parallel=2),  # the last: DeepSpeed cannot undo it in a process
}


def compare_passes(subject: Subject) -> Iterator[Comparison]:
    """Compare passes of one rank with plain Transformers, which sees one sequence at a time."""
    for name, keys in (HERE | {name: merge(packing_of(subject), keys) for name, keys in EITHER.items()}).items():
        yield from guard(name, partial(compare_here, subject, name, keys))


def compare_here(subject: Subject, name: str, keys: Tree) -> list[Comparison]:
    with open_here(subject, keys) as group:
        remarks: list[str] = []
        group.report = lambda finding: remarks.append(finding.what)
        found = measure(group, subject.samples)
    if remarks:  # the run would go on without
        return [Comparison(name, "all", Result.REFUSED, remark=remarks[0])]
    return compare_all(name, subject.plain, found, subject.limits)


def compare_ranks(subject: Subject) -> Iterator[Comparison]:
    """Compare layouts of several ranks; of one, where there is one GPU."""
    config, machine = subject.config, subject.machine
    ranks = config.training.ranks or min(machine.gpus or 2, 2)
    layouts: Mapping[str, Tree] = OVER_RANKS | (SPLIT if ranks == 2 else {})
    if config.runtime == "local":
        yield Comparison("several ranks", "all", Result.LEFT_OUT, remark="runtime=local has one process")
        return
    with open_ranks(subject, ranks) as opened:
        for name, keys in layouts.items():
            title = f"{name}, {ranks} rank{'s' * (ranks > 1)}"
            layout = merge(packing_of(subject), keys)
            yield from guard(title, partial(compare_on, opened.open, subject, title, layout))
    if ranks != 2:
        yield Comparison("context and tensor parallel", "all", Result.LEFT_OUT, remark="need two ranks")


def packing_of(subject: Subject) -> Tree:
    """Pack sequences, unless the model cannot be packed."""
    return training(packing=not subject.facts.unpackable)


def compare_on(opened: Open, subject: Subject, name: str, keys: Tree) -> list[Comparison]:
    return compare_all(name, subject.plain, measure(opened(keys), subject.samples), subject.limits)


def guard(check: str, compared: Callable[[], list[Comparison]]) -> list[Comparison]:
    """Return what a check finds; keys that a run would refuse are named, and an error is no agreement."""
    try:
        return compared()
    except FAILURES as error:
        return [failed_check(check, error)]


def failed_check(check: str, error: Exception) -> Comparison:
    # An error of another process names its type.
    refused = isinstance(error, ConfigError) and not isinstance(error, ProbeFailure)
    result = Result.REFUSED if refused or f" {ConfigError.__name__}: " in str(error) else Result.DIFFERS
    return Comparison(check, "all", result, remark=str(error).partition("\n")[0])
