"""What is saved opens again: as a model, as a training state, with its adapter merged."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trueline.config.base import Tree
from trueline.training.export import open_model
from trueline.training.worker import Worker
from trueline.verify.comparison import Comparison, Result, Rows, compare, compare_logprobs, gaps
from trueline.verify.divisions import guard, packing_of
from trueline.verify.subject import Subject, masked_rows, plain_rows
from trueline.verify.trainers import RATE, open_here, save, step

RANK = 8
ADAPTER_RATE = 1e-2  # B begins at zero, so that small steps change little


def compare_saved(subject: Subject) -> Iterator[Comparison]:
    keys = packing_of(subject)
    yield from guard("saved and resumed", partial(check_saved, subject, keys))
    yield from guard("adapter", partial(check_adapter, subject, keys))


def check_saved(subject: Subject, keys: Tree) -> list[Comparison]:
    folder = subject.folder / "saved"
    with open_here(subject, keys, RATE) as group:
        step(group, subject.samples)
        trained = masked_rows(group.score(subject.samples), subject.samples)
        save(group, folder)
        step(group, subject.samples)
        (expected,) = group.call(Worker.fingerprints)
    with open_here(subject, keys, RATE) as group:
        group.call(Worker.load, str(folder))
        step(group, subject.samples)
        (found,) = group.call(Worker.fingerprints)
    wrong = [name for name in expected if expected[name] != found.get(name)]
    remark = f"{wrong[0]} and {len(wrong) - 1} more" if wrong else f"{len(expected)} tensors, bit for bit"
    return [
        compare_opened("saved and opened", subject, folder / "model", trained),
        compare("resumed", "weights after a step", len(wrong), 0, remark),
    ]


def check_adapter(subject: Subject, keys: Tree) -> list[Comparison]:
    """Compare a trained adapter beside its model with both merged into one."""
    if subject.config.model.train_vision != "none":
        return [
            Comparison(
                "adapter, merged", "log-probs", Result.LEFT_OUT, remark="model.train_vision trains whole weights"
            )
        ]
    folder, asked = subject.folder / "adapter", subject.adapter
    lora = {"rank": asked.rank or RANK, "alpha": asked.alpha, "targets": asked.targets, "sync": "merged"}
    with open_here(subject, keys | {"model": {"lora": lora}}, ADAPTER_RATE) as group:
        for _ in range(2):
            step(group, subject.samples)
        trained = masked_rows(group.score(subject.samples), subject.samples)
        save(group, folder)
    return [compare_opened("adapter, merged", subject, folder / "model", trained)]


def compare_opened(check: str, subject: Subject, folder: Path, trained: Rows) -> Comparison:
    """Compare what a model said before it was saved with what Transformers says of its folder."""
    moved, _ = gaps(subject.plain.logprobs, trained)
    if not moved > subject.limits.mean:  # weights of the start would look the same
        return Comparison(check, "log-probs", Result.DIFFERS, remark="the steps before it changed too little")
    config = subject.config.model
    model, _ = open_model(folder, config.dtype, trust_remote_code=config.trust_remote_code)
    opened = plain_rows(model.to(subject.device()), subject.samples)
    return compare_logprobs(check, trained, opened, subject.limits, f"the steps before it moved them by {moved:.1e}")
