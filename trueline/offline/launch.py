"""Prepare a run of an offline task from its configuration, or show its rows."""

import sys
from functools import partial

from trueline.config.supervised import SupervisedConfig
from trueline.data.preview import render
from trueline.offline.build import supervised_trainer
from trueline.offline.plan import describe_plan, plan_supervised
from trueline.runs.launch import Job, Start, training
from trueline.runs.preflight import chained


def prepare_supervised(config: SupervisedConfig, start: Start) -> Job:
    plan = plan_supervised(config)
    trainer = partial(supervised_trainer, plan.without_records())
    return training(plan.config, describe_plan(plan), plan.steps, trainer, plan.reading())


def show_preview(config: SupervisedConfig, rows: int) -> int:
    """Show the first rows as the model will see them, learnt stretches marked."""
    plan = plan_supervised(chained(config)[0], here=False)
    train = plan.material.train
    color = sys.stdout.isatty()
    sys.stdout.write(describe_plan(plan) + "\n")
    for number, sample in enumerate(train.samples[: rows * train.task.together]):
        row, part = divmod(number, train.task.together)
        which = f" {('chosen', 'rejected')[part]}" if train.task.together == 2 else ""
        sys.stdout.write(f"\nrow {row + 1}{which}: {render(sample, plan.chat.tokenizer, color)}\n")
    return 0
